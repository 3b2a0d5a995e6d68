"""The benchmarks run, and what they compare computes the same."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ring
from scripts.bench import decoding, peers
from scripts.bench.turns import medians

ROOT = Path(__file__).parent.parent.parent


def test_rotating_decoding_equals_the_cache_at_rest():
    mesh = ring.make_mesh(ring=8)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 3, 4, 8))
    k, v = (jax.random.normal(key, (2, 64, 2, 8)) for key in keys[1:])
    order = np.random.default_rng(0).permutation(64).astype(np.int32)
    order[order > 50] = -1
    cache, place = ring.KV.of(k, v, jnp.asarray(order)), jnp.array([30, 45, 50])
    expected = ring.decode_attention(q, place, [cache], mesh=mesh)
    found = jax.jit(lambda *x: decoding.rotating(*x, mesh))(q, place, cache)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_one_device_peer_computes_the_same():
    q, k, v = (
        jax.random.normal(key, (1, 32, 2, 8)) for key in jax.random.split(jax.random.key(0), 3)
    )
    np.testing.assert_allclose(
        peers.dot_product_attention(q, k, v), ring.attention(q, k, v), atol=1e-5
    )


def test_peers_that_are_not_there_say_how_to_get_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="pip install --no-deps --target"):
        peers.ringattention(tmp_path, ring.make_mesh(ring=2), 256)


def test_every_call_takes_its_turns():
    made = []
    taken = medians({"a": lambda: made.append("a"), "b": lambda: made.append("b")}, 3)
    assert made == ["a", "b"] * 4 and taken["a"].wall > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("ring", "--tokens", "512", "--block-sizes", "32", "--repeats", "1"),
        ("exorl", "--states", "20", "--episodes", "2", "--repeats", "1"),
        ("train", "--tokens", "512", "--trajectories", "4", "--block-size", "64", "--repeats", "1"),
    ],
)
def test_benchmarks_run(options):
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench", *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "×" in done.stdout or "÷" in done.stdout
