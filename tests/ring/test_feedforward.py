"""Blockwise feed-forward is the feed-forward, without moving activations."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ring

WIDTH = 8


def setup(batch=4, length=37):
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {
        "up": jax.random.normal(keys[0], (WIDTH, 4 * WIDTH)) / 3,
        "down": jax.random.normal(keys[1], (4 * WIDTH, WIDTH)) / 5,
    }
    return weights, jax.random.normal(keys[2], (batch, length, WIDTH))


def loss(weights, x, block_size=None):
    def fn(x):
        return jax.nn.gelu(x @ weights["up"]) @ weights["down"]

    y = fn(x) if block_size is None else ring.blockwise_feedforward(fn, x, block_size=block_size)
    return (y**2).mean(), y


both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)


def same(actual, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), actual, expected
    )


@given(length=st.integers(1, 30), block_size=st.integers(1, 40))
@settings(max_examples=3, deadline=None, derandomize=True)
def test_any_length_and_block(length, block_size):
    weights, x = setup(2, length)
    same(both(weights, x, block_size), both(weights, x))


@pytest.mark.parametrize("sizes", [{"data": 2, "ring": 4}, {"fsdp": 2, "ring": 2, "tensor": 2}])
def test_on_a_mesh(sizes):
    weights, x = setup()
    expected = both(weights, x)
    with jax.set_mesh(ring.make_mesh(**sizes)):
        same(both(weights, x, 5), expected)


def test_reads_an_nnx_module():
    _, x = setup()
    layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    with jax.set_mesh(ring.make_mesh(ring=2)):
        for _ in range(2):
            y = ring.blockwise_feedforward(layer, x, block_size=4)
            np.testing.assert_allclose(y, layer(x), rtol=1e-5, atol=1e-6)
            layer.kernel[...] *= 2


def test_only_parameters_and_their_gradients_travel_and_outside_the_loop():
    mesh = ring.make_mesh(data=2, ring=4)
    weights, x = setup(length=128)
    weights = jax.device_put(weights, NamedSharding(mesh, P(("fsdp", "ring"))))
    x = jax.device_put(x, NamedSharding(mesh, P(("data", "fsdp"), "ring")))
    with jax.set_mesh(mesh):
        text = both.lower(weights, x, 8).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    kinds = re.findall(r" (all-[a-z-]+|collective-permute|reduce-scatter)\(", text)
    assert set(kinds) <= {"all-gather", "all-reduce", "reduce-scatter"}
    assert all(f" {kind}(" not in text[: text.index("\nENTRY")] for kind in kinds)
    gathered = re.findall(r"f32\[([\d,]*)\]\S* all-gather\(", entry)
    assert sorted(gathered) == ["32,8", "8,32"]


def test_hidden_activations_of_one_block_live_at_once():
    weights, x = setup(length=4096)

    def temporary_bytes(block_size):
        compiled = both.lower(weights, x, block_size).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    hidden = 4 * 4096 * 4 * WIDTH * 4
    assert temporary_bytes(None) > hidden
    assert temporary_bytes(128) < temporary_bytes(None) - 0.8 * hidden


def test_refusals():
    _, x = setup(batch=3)
    with pytest.raises(ValueError, match="block_size 0 must be positive"):
        ring.blockwise_feedforward(jnp.sin, x, block_size=0)
    with pytest.raises(ValueError, match="batch 3 does not divide over mesh axis data"):
        ring.blockwise_feedforward(jnp.sin, x, block_size=4, mesh=ring.make_mesh(data=2))
