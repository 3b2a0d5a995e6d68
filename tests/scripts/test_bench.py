"""The benchmarks run, and what they compare computes the same."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ring
from scripts.bench import balance, decoding, parity, peers, recall_report, train
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


def test_layouts_are_compared_by_the_pairs_that_they_leave_each_device():
    table = {(row[0], row[1]): row[2:] for row in balance.rows(seed=0)}
    assert table["8", "none"][:2] == ["1.87 (1.87)", "1.00 (1.00)"]
    contiguous, *_, striped = table["8", "128 of 4,000 tokens"]
    assert contiguous == "1.00 (1.00)" and striped == "1.00 (3.88)"


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


@pytest.mark.slow
def test_a_step_of_32_000_tokens_is_bpts_around_a_ring_of_eight(tmp_path):
    config = parity.config_of(train.synthetic(tmp_path, 12), "walker_run", 8, 8, 0)
    found = parity.apart(parity.step(config), parity.step(parity.by_bpt(config)))
    assert max(found) <= 1e-5, found


@pytest.mark.slow
def test_recall_is_learned_around_a_ring_and_needs_the_other_trajectories(tmp_path):
    command = [sys.executable, "-m", "scripts.bench", "recall", "--seeds", "0"]
    command += ["--lengths", "1000", "2000", "--trained", "500", "--batch-tokens", "1000"]
    command += ["--chains", "1", "--ring-size", "2"]
    command += ["--run", str(tmp_path / "agents"), "--out", str(tmp_path / "found")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = recall_report.read(tmp_path / "found" / "recall.csv")
    assert {each[:4] for each in found} == {
        (0, mode, tokens, 0) for mode in recall_report.MODES for tokens in (1000, 2000)
    }
    for mode, low, high in (("ring", 0.9, 1), ("bpt", 0.9, 1), ("own", 0, 0.05)):
        assert low <= recall_report.accuracy([each for each in found if each.mode == mode]) <= high
    assert all(each.difference < 1e-4 for each in found)
    for name in ("recall.png", "recall_distance.png"):
        assert (tmp_path / "found" / name).stat().st_size > 1000
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0 and "loss" not in again.stdout
    assert done.stdout.endswith(again.stdout)


def test_accuracy_is_of_all_questions():
    few = recall_report.Answers(0, "ring", 1000, 0, 0, asked=10, right=1, difference=0)
    assert recall_report.accuracy([few, few._replace(asked=30, right=29)]) == 0.75
