"""Decoding: a few queries against caches that stay where they are, sharded over the ring.

Each device attends to its own shard of every cache; partial results merge by log-sum-exp, with one
maximum and one sum over the ring a call, whatever the number of caches.

Shyam et al. 2024, Tree Attention (arXiv 2408.04093), has the same reduction.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from ring.blockwise import FLOOR, Softmax, finish
from ring.mesh import Axes, context_mesh
from ring.tokens import Tokens, per_token, visible


class KV(NamedTuple):
    """Cached keys and values with what attention knows of them.

    k, v [Bc, C, Hkv, D]: Bc is the batch, or 1 for a prefix that the whole batch shares; C is the
    capacity, sharded over the ring. order int32 [C] or [Bc, C]: −1 marks an empty slot. segments
    like order, or None.
    """

    k: Array
    v: Array
    order: Array
    segments: Array | None = None


def decode_attention(
    q: Array,
    q_order: Array,
    caches: Sequence[KV],
    *,
    q_segments: Array | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis: str = "ring",
    batch_axes: Sequence[str] = ("data", "fsdp"),
    head_axis: str = "tensor",
) -> Array:
    """Attends q [B, Tq, H, D] to every entry of the caches with 0 ≤ order ≤ the query's order.

    The queries' own keys must be in a cache already. Queries are replicated over the ring, caches
    never move: two collectives over `axis`, none where it has size 1. Scores are float32
    [B, H, Tq, C / R] a cache: meant for short queries.

    Args:
        q: Queries [B, Tq, H, D]. A query that sees no entry gets 0.
        q_order: int32 [Tq] or [B, Tq]; −1 is padding.
        caches: At least one. Orders are compared across all of them.
        q_segments: int32 like `q_order`, given exactly where the caches have segments.
        mesh: By default the mesh of the context (`jax.set_mesh`), or else one device.
        axis: Mesh axis over which C is sharded.
        batch_axes: Mesh axes of the batch.
        head_axis: Mesh axis of the heads.

    Returns:
        [B, Tq, H, D] in q's dtype, replicated over the ring.

    Raises:
        ValueError: Shapes do not fit together or do not divide over the mesh.
    """
    if not caches:
        raise ValueError("decode_attention needs at least one cache")
    query = _tokens("the query", q_order, q_segments, *q.shape[:2])
    mesh = context_mesh(mesh)
    axes = Axes.of(mesh, axis, batch_axes, head_axis)
    axes.check(batch=q.shape[0], heads=q.shape[2], key_heads=caches[0].k.shape[2])
    for n, cache in enumerate(caches):
        _check(n, cache, q, q_segments is not None, axes.ring_size)
    operands = [
        (k, v, _tokens(f"cache {n}", order, segments, *k.shape[:2]))
        for n, (k, v, order, segments) in enumerate(caches)
    ]
    shard = functools.partial(_shard, axes.sequence)
    if mesh is None:
        return shard(q, query, operands)

    def spec(x: Array, sequence: str | None) -> P:
        batch = axes.batch if x.shape[0] > 1 else None
        return P(batch, sequence, axes.heads) if x.ndim == 4 else P(batch, sequence)

    return jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(
            P(axes.batch, None, axes.heads),
            jax.tree.map(lambda x: spec(x, None), query),
            jax.tree.map(lambda x: spec(x, axes.sequence), operands),
        ),
        out_specs=P(axes.batch, None, axes.heads),
    )(q, query, operands)


def _shard(
    axis: str | None, q: Array, query: Tokens, caches: list[tuple[Array, Array, Tokens]]
) -> Array:
    """What one device does: its queries against its part of every cache."""
    batch, length, heads, width = q.shape
    shared = caches[0][0].shape[2]
    grouped = q.reshape(batch, length, shared, heads // shared, width)
    parts = [_attend(grouped, query, *cache) for cache in caches]
    highest = functools.reduce(jnp.maximum, (part.highest for part in parts))
    if axis is not None:
        highest = lax.pmax(highest, axis)
    packed = jnp.zeros((), jnp.float32)
    for part in parts:
        both = jnp.concatenate([part.values, part.total[..., None]], axis=-1)
        packed += both * jnp.exp(part.highest - highest)[..., None]
    if axis is not None:
        packed = lax.psum(packed, axis)
    out, _ = finish(Softmax(highest, packed[..., -1], packed[..., :-1]), 1.0, q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _attend(q: Array, query: Tokens, k: Array, v: Array, key: Tokens) -> Softmax:
    """Softmax state of q [B, Tq, Hkv, G, D] after one cache shard: [B, Hkv, G, Tq], all float32."""
    cache = "b"
    if k.shape[0] == 1:  # the batch becomes rows of one product instead of copies of the cache
        k, v, cache = k[0], v[0], ""
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = dot(f"bqhgd,{cache}khd->bhgqk", q, k) / math.sqrt(q.shape[-1])
    scores = jnp.where(visible(query, key)[:, None, None], scores, -jnp.inf)
    highest = jnp.maximum(scores.max(-1), FLOOR)
    weights = jnp.exp(scores - highest[..., None])
    values = dot(f"bhgqk,{cache}khd->bhgqd", weights.astype(v.dtype), v)
    return Softmax(highest, weights.sum(-1), values)


def _tokens(name: str, order: Array, segments: Array | None, batch: int, length: int) -> Tokens:
    order = per_token(f"order of {name}", order, batch, length)
    if segments is not None:
        segments = per_token(f"segments of {name}", segments, batch, length)
    return Tokens(order, segments)


def _check(n: int, cache: KV, q: Array, segmented: bool, ring_size: int) -> None:
    batch, _, heads, width = q.shape
    k, v = cache.k, cache.v
    if k.ndim != 4 or k.shape != v.shape or k.shape[0] not in (1, batch) or k.shape[3] != width:
        raise ValueError(
            f"cache {n} has k {k.shape}, v {v.shape}; queries {q.shape} need both as "
            f"[{batch} or 1, C, Hkv, {width}]"
        )
    if heads % k.shape[2]:
        raise ValueError(f"cache {n} has {k.shape[2]} key heads, which must divide {heads}")
    if k.shape[1] % ring_size:
        raise ValueError(
            f"capacity {k.shape[1]} of cache {n} does not divide over a ring of {ring_size}; "
            f"{-(-k.shape[1] // ring_size) * ring_size} would"
        )
    if segmented != (cache.segments is not None):
        raise ValueError(
            f"cache {n} has {'no ' if segmented else ''}segments, the query has "
            f"{'' if segmented else 'none'}; give segments to both or to neither"
        )
