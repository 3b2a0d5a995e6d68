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
from ring.tokens import PADDING, Tokens, per_token, visible


class KV(NamedTuple):
    """Cached keys and values with what attention knows of them.

    k [Bc, Hkv, D, C], v [Bc, Hkv, C, D]: products read both as they lie, which spares a copy of the
    cache a call. Bc is the batch, or 1 for a prefix that the whole batch shares; C is the capacity,
    sharded over the ring. order int32 [C] or [Bc, C]: −1 marks an empty slot. segments like order,
    or None.
    """

    k: Array
    v: Array
    order: Array
    segments: Array | None = None

    @classmethod
    def of(cls, k: Array, v: Array, order: Array, segments: Array | None = None) -> "KV":
        """A cache of keys and values [Bc, C, Hkv, D], as attention takes them."""
        return cls(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), order, segments)


def decode_attention(
    q: Array,
    q_order: Array,
    caches: Sequence[KV],
    *,
    new: KV | None = None,
    q_segments: Array | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis: str = "ring",
    batch_axes: Sequence[str] = ("data", "fsdp"),
    head_axis: str = "tensor",
) -> Array:
    """Attends q [B, Tq, H, D] to every entry of the caches with 0 ≤ order ≤ the query's order.

    The queries' own keys must be in a cache already, or be `new`. Queries are replicated over the
    ring, caches never move: two collectives over `axis`, none where it has size 1. Scores are
    float32 [B, H, Tq, C / R] a cache: meant for short queries.

    Args:
        q: Queries [B, Tq, H, D]. A query that sees no entry gets 0.
        q_order: int32 [Tq] or [B, Tq]; −1 is padding.
        caches: At least one. Orders are compared across all of them.
        new: Entries of no cache yet, the same on all devices of the ring, of any capacity. They can
            be written into a cache afterwards: a program that reads a cache after it has written
            it needs copies of it where the compiler fuses writing with both.
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
    if q.ndim != 4 or not q.size:
        raise ValueError(f"expected queries [B, Tq, H, D], none of them 0, got {q.shape}")
    query = _tokens("the query", q_order, q_segments, *q.shape[:2])
    mesh = context_mesh(mesh)
    axes = Axes.of(mesh, axis, batch_axes, head_axis)
    axes.check(batch=q.shape[0], heads=q.shape[2], key_heads=caches[0].v.shape[1])
    shared = {each.v.shape[1] for each in (*caches, *([] if new is None else [new]))}
    if len(shared) > 1:
        raise ValueError(f"caches have {sorted(shared)} key heads; they must have the same number")
    for n, cache in enumerate(caches):
        _check(f"cache {n}", cache, q, q_segments is not None, axes.ring_size)
    sharded = [_operand(f"cache {n}", cache) for n, cache in enumerate(caches)]
    whole = []
    if new is not None:
        _check("new", new, q, q_segments is not None, 1)
        whole = [_operand("new", new)]
    shard = functools.partial(_shard, axes.sequence)
    if mesh is None:
        return shard(q, query, sharded, whole)

    def tokens(x: Array, sequence: str | None) -> P:
        return P(axes.batch if x.shape[0] > 1 else None, sequence)

    def cached(k: Array, v: Array, key: Tokens, sequence: str | None) -> tuple[P, P, Tokens]:
        batch = axes.batch if k.shape[0] > 1 else None
        return (
            P(batch, axes.heads, None, sequence),
            P(batch, axes.heads, sequence),
            jax.tree.map(lambda x: tokens(x, sequence), key),
        )

    return jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(
            P(axes.batch, None, axes.heads),
            jax.tree.map(lambda x: tokens(x, None), query),
            [cached(*each, axes.sequence) for each in sharded],
            [cached(*each, None) for each in whole],
        ),
        out_specs=P(axes.batch, None, axes.heads),
    )(q, query, sharded, whole)


_Operand = tuple[Array, Array, Tokens]


def _shard(
    axis: str | None, q: Array, query: Tokens, sharded: list[_Operand], whole: list[_Operand]
) -> Array:
    """What one device does: its queries against its part of every cache, and what is whole."""
    batch, length, heads, width = q.shape
    caches = [*sharded]
    for k, v, key in whole:
        if axis is not None:  # one device counts them
            key = key._replace(order=jnp.where(lax.axis_index(axis) == 0, key.order, PADDING))
        caches.append((k, v, key))
    shared = caches[0][1].shape[1]
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
    """Softmax state of q [B, Tq, Hkv, G, D] after one cache shard: [B, Hkv, G, Tq], all float32.

    All queries that read the same keys are the rows of one product; a prefix that the batch shares
    is read once for all of it.
    """
    batch, length, heads, groups, width = q.shape
    caches = k.shape[0]
    dot = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    # [Bc, Hkv, B / Bc, G, Tq], where the middle three are rows.
    shape = (caches, heads, batch // caches, groups, length)
    rows = q.reshape(caches, -1, length, heads, groups, width).transpose(0, 3, 1, 4, 2, 5)
    scores = dot(rows.reshape(caches, heads, -1, width), k).reshape(*shape, -1)
    seen = visible(query, key)
    seen = seen.reshape(caches if len(seen) == batch else 1, 1, -1, 1, *seen.shape[1:])
    scores = jnp.where(seen, scores / math.sqrt(width), -jnp.inf)
    highest = jnp.maximum(scores.max(-1), FLOOR)
    weights = jnp.exp(scores - highest[..., None])
    values = dot(weights.reshape(caches, heads, -1, k.shape[3]).astype(v.dtype), v)

    def by_batch(x: Array) -> Array:
        return x.swapaxes(1, 2).reshape(batch, heads, *x.shape[3:])

    state = highest, weights.sum(-1), values.reshape(*shape, width)
    return Softmax(*map(by_batch, state))


def _operand(name: str, cache: KV) -> _Operand:
    k, v, order, segments = cache
    return k, v, _tokens(name, order, segments, k.shape[0], k.shape[3])


def _tokens(name: str, order: Array, segments: Array | None, batch: int, length: int) -> Tokens:
    order = per_token(f"order of {name}", order, batch, length)
    if segments is not None:
        segments = per_token(f"segments of {name}", segments, batch, length)
    return Tokens(order, segments)


def _check(name: str, cache: KV, q: Array, segmented: bool, ring_size: int) -> None:
    batch, _, heads, width = q.shape
    k, v = cache.k, cache.v
    turned = (*v.shape[:2], *v.shape[:1:-1])
    if v.ndim != 4 or k.shape != turned or v.shape[0] not in (1, batch) or v.shape[3] != width:
        raise ValueError(
            f"{name} has k {k.shape}, v {v.shape}; queries {q.shape} need "
            f"[{batch} or 1, Hkv, {width}, C] and [{batch} or 1, Hkv, C, {width}]"
        )
    if heads % v.shape[1]:
        raise ValueError(f"{name} has {v.shape[1]} key heads, which must divide {heads}")
    if v.shape[2] % ring_size:
        raise ValueError(
            f"capacity {v.shape[2]} of {name} does not divide over a ring of {ring_size}; "
            f"{-(-v.shape[2] // ring_size) * ring_size} would"
        )
    if segmented != (cache.segments is not None):
        raise ValueError(
            f"{name} has {'no ' if segmented else ''}segments, the query has "
            f"{'' if segmented else 'none'}; give segments to both or to neither"
        )
