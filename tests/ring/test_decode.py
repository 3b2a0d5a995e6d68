"""Decoding over sharded caches is attention to everything in them."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ring
from ring import KV

COLLECTIVE = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("

MESHES = [None, {}, {"ring": 8}, {"data": 2, "ring": 4}, {"fsdp": 2, "ring": 2, "tensor": 2}]


def entries(seed, batch, capacity, orders, key_heads=2, width=4):
    """A cache of `capacity` slots, filled with `orders` at random places."""
    rng = np.random.default_rng(seed)
    order = np.full(capacity, -1, np.int32)
    order[rng.choice(capacity, len(orders), replace=False)] = orders
    k, v = rng.normal(size=(2, batch, capacity, key_heads, width)).astype(np.float32)
    return KV.of(k, v, order)


def queries(batch=4, length=3, heads=4, width=4):
    return np.random.default_rng(9).normal(size=(batch, length, heads, width)).astype(np.float32)


def expected(oracle, q, q_order, caches, q_segments=None):
    batch = q.shape[0]
    k, v = (
        np.concatenate(
            [np.broadcast_to(x := np.transpose(c[n], to), (batch, *x.shape[1:])) for c in caches], 1
        )
        for n, to in enumerate([(0, 3, 1, 2), (0, 2, 1, 3)])
    )
    order, segments = (
        None
        if caches[0][n] is None
        else np.concatenate([np.broadcast_to(c[n], (batch, c.k.shape[3])) for c in caches], axis=1)
        for n in (2, 3)
    )
    options = {} if q_segments is None else {"segments": (q_segments, segments)}
    return oracle(q, k, v, np.zeros_like(q), order=(q_order, order), **options)[0]


@pytest.mark.parametrize("sizes", MESHES)
def test_prefix_and_suffix(sizes, oracle):
    mesh = None if sizes is None else ring.make_mesh(**sizes)
    q, q_order = queries(), np.array([20, 21, 22], np.int32)
    caches = [entries(0, 1, 16, np.arange(13)), entries(1, 4, 24, np.arange(13, 28))]
    decode = jax.jit(lambda *operands: ring.decode_attention(*operands, mesh=mesh))
    out = decode(q, q_order, caches)
    np.testing.assert_allclose(out, expected(oracle, q, q_order, caches), rtol=1e-5, atol=1e-5)
    text = decode.lower(q, q_order, caches).compile().as_text()
    sent = collections.Counter(re.findall(COLLECTIVE, text))
    assert sent == ({"all-reduce": 2} if mesh is not None and mesh.shape["ring"] > 1 else {})


@pytest.mark.parametrize("sizes", [None, {"ring": 8}, {"data": 2, "ring": 2, "tensor": 2}])
def test_new_entries_are_seen_once(sizes, oracle):
    """Beside a prefix that the rows share, though each is at another place."""
    mesh = None if sizes is None else ring.make_mesh(**sizes)
    q, start = queries(heads=8), 13 + np.arange(4)[:, None]
    q_order = (start + np.arange(3)).astype(np.int32)
    caches = [entries(0, 1, 16, np.arange(13)), entries(1, 4, 24, np.arange(13, 28))]
    new = entries(2, 4, 3, [])._replace(order=q_order)  # a capacity that divides over nothing
    earlier = np.where(np.asarray(caches[1].order) < start, caches[1].order, -1).astype(np.int32)
    caches[1] = caches[1]._replace(order=earlier)
    out = jax.jit(lambda *x: ring.decode_attention(*x[:-1], new=x[-1], mesh=mesh))(
        q, q_order, caches, new
    )
    wanted = expected(oracle, q, q_order, [*caches, new])
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)


def test_rows_differ_in_order_and_segment(oracle):
    rng = np.random.default_rng(3)
    q = queries()
    q_order = rng.integers(-1, 16, size=(4, 3)).astype(np.int32)
    q_order[2] = -1
    q_segments = rng.integers(0, 2, size=(4, 3)).astype(np.int32)
    cache = entries(4, 4, 16, [])
    order = np.stack([rng.permutation(16) - 2 for _ in range(4)]).clip(-1).astype(np.int32)
    segments = rng.integers(0, 2, size=(4, 16)).astype(np.int32)
    caches = [KV(cache.k, cache.v, order, segments)]
    with jax.set_mesh(ring.make_mesh(data=2, ring=4)):
        out = ring.decode_attention(q, q_order, caches, q_segments=q_segments)
    np.testing.assert_allclose(
        out, expected(oracle, q, q_order, caches, q_segments), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(out[2], 0)


def test_one_token_at_a_time_equals_attention_over_the_sequence():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (2, 12, 2, 4)) for key in keys)
    whole = ring.attention(q, k, v)
    mesh = ring.make_mesh(ring=4)
    decode = jax.jit(lambda q, at, cache: ring.decode_attention(q, at, [cache], mesh=mesh))
    order = np.full(12, -1, np.int32)
    for t in range(12):
        order[t] = t
        out = decode(q[:, t : t + 1], jnp.array([t]), KV.of(k, v, order))
        np.testing.assert_allclose(out, whole[:, t : t + 1], rtol=1e-5, atol=1e-5)


def test_bfloat16_caches_keep_the_query_dtype():
    cache = entries(5, 4, 16, np.arange(10))
    half = KV(*(jnp.asarray(x, jnp.bfloat16) for x in cache[:2]), cache.order)
    q = jnp.asarray(queries(), jnp.bfloat16)
    out = ring.decode_attention(q, jnp.array([9, 9, 9]), [half], mesh=ring.make_mesh(ring=2))
    exact = ring.decode_attention(queries(), jnp.array([9, 9, 9]), [cache])
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), exact, rtol=0.02, atol=0.02)


def test_refusals():
    q, at, cache = queries(), np.array([1, 2, 3]), entries(0, 4, 18, np.arange(3))
    with pytest.raises(ValueError, match="at least one cache"):
        ring.decode_attention(q, at, [])
    other = entries(0, 4, 16, np.arange(3), key_heads=1)
    with pytest.raises(ValueError, match=r"caches have \[1, 2\] key heads"):
        ring.decode_attention(q, at, [cache, other])
    with pytest.raises(ValueError, match=r"expected queries \[B, Tq, H, D\].*got \(3, 4, 4\)"):
        ring.decode_attention(q[0], at, [cache])
    with pytest.raises(ValueError, match=r"capacity 18 of cache 0.*ring of 4; 20 would"):
        ring.decode_attention(q, at, [cache], mesh=ring.make_mesh(ring=4))
    with pytest.raises(ValueError, match="give segments to both or to neither"):
        ring.decode_attention(q, at, [cache], q_segments=at)
    with pytest.raises(ValueError, match=r"order of the query has shape \(2,\)"):
        ring.decode_attention(q, at[:2], [cache])
    with pytest.raises(ValueError, match=r"queries \(3, 3, 4, 4\) need \[3 or 1"):
        ring.decode_attention(q[:3], at, [cache])
