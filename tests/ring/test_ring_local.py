"""The same attention inside a shard_map of the caller's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ring
from ring.mesh import vary_alike
from ring.ring import Ring, rotate


def arrays(length=32, batch=2, heads=2, width=4):
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (batch, length, heads, width)) for key in keys]


def test_matches_attention_with_its_gradients():
    q, k, v, dout = arrays()
    mesh = ring.make_mesh(data=2, ring=4)
    spec = P("data", "ring")
    local = jax.shard_map(
        functools.partial(ring.ring_attention_local, axis="ring", block_size=4),
        mesh=mesh,
        in_specs=(spec, spec, spec),
        out_specs=spec,
    )
    out, vjp = jax.vjp(jax.jit(local), q, k, v)
    expected, expected_vjp = jax.vjp(ring.attention, q, k, v)
    for x, y in zip((out, *vjp(dout)), (expected, *expected_vjp(dout)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_gradients_of_replicated_keys_are_summed():
    q, k, v, dout = arrays()
    local = jax.shard_map(
        lambda q, k, v: ring.ring_attention_local(q, k, v, axis=None, causal=False),
        mesh=ring.make_mesh(ring=4),
        in_specs=(P(None, "ring"), P(), P()),
        out_specs=P(None, "ring"),
    )
    gradients = jax.vjp(jax.jit(local), q, k, v)[1](dout)
    attend = functools.partial(ring.attention, causal=False)
    for x, y in zip(gradients, jax.vjp(attend, q, k, v)[1](dout), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_refuses_a_shard_that_does_not_divide():
    q, k, v, _ = arrays(length=24)
    with pytest.raises(ValueError, match=r"length 24 is not a multiple of block_size 10.*=8"):
        ring.ring_attention_local(q, k, v, axis=None, block_size=10)


def test_attention_refuses_to_nest():
    q, k, v, _ = arrays()
    nested = jax.shard_map(
        ring.attention, mesh=ring.make_mesh(ring=2), in_specs=P(None, "ring"), out_specs=P()
    )
    with pytest.raises(ValueError, match="ring_attention_local"):
        nested(q, k, v)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rotation_is_exact_in_every_bit(dtype):
    rng = np.random.default_rng(0)
    ids = rng.integers(-(2**31), 2**31, size=(4, 6), dtype=np.int32)
    values = jnp.asarray(rng.normal(size=(4, 3, 2)), dtype).at[0, 0].set(jnp.nan)
    mesh = ring.make_mesh(ring=4)
    moved_ids, moved = jax.shard_map(
        lambda *tree: rotate(vary_alike(tree), Ring("ring", 4, 1.0)),
        mesh=mesh,
        in_specs=P("ring"),
        out_specs=P("ring"),
    )(ids, values)
    np.testing.assert_array_equal(moved_ids, np.roll(ids, 1, axis=0))
    assert moved.dtype == dtype
    bits = f"uint{8 * moved.dtype.itemsize}"
    np.testing.assert_array_equal(
        np.asarray(moved).view(bits), np.roll(np.asarray(values).view(bits), 1, axis=0)
    )
