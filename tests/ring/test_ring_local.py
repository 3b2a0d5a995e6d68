"""The same attention inside a shard_map of the caller's."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ring


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
    q, k, v, _ = arrays(length=25)
    with pytest.raises(ValueError, match=r"length 25 does not divide into 4 blocks.*to 28"):
        ring.ring_attention_local(q, k, v, axis=None, block_size=10)


@pytest.mark.parametrize(
    ("checked", "message"),
    [
        (False, "check_vma=True"),  # nobody can tell
        (True, "k is the same on all devices of mesh axis ring; shard"),
    ],
)
def test_refuses_to_send_around_what_may_be_the_same_everywhere(checked, message):
    q, k, v, _ = arrays()
    local = jax.shard_map(
        functools.partial(ring.ring_attention_local, axis="ring", causal=False),
        mesh=ring.make_mesh(ring=4),
        in_specs=(P(None, "ring"), P(), P()),
        out_specs=P(None, "ring"),
        check_vma=checked,
    )
    with pytest.raises(ValueError, match=message):
        local(q, k, v)


def test_attention_refuses_to_nest():
    q, k, v, _ = arrays()
    nested = jax.shard_map(
        ring.attention, mesh=ring.make_mesh(ring=2), in_specs=P(None, "ring"), out_specs=P()
    )
    with pytest.raises(ValueError, match="ring_attention_local"):
        nested(q, k, v)
