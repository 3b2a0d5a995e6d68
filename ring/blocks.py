"""Cutting sequences into blocks, and deciding which pairs of blocks meet.

Blocked arrays have six dimensions, so that loops run over the leading three and one product works
on the trailing three:

    q, out  [row groups, head groups, query blocks, n, M, D]
    k, v    [row groups, head groups, key blocks,   n, K, D]
    tokens  [row groups or 1, blocks, rows or 1, K]

n batch rows times key heads are worked on together, M = G · K are the rows of a query block for all
G = H / Hkv query heads that share a key head: grouped queries never repeat K or V.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ring.tokens import PADDING, Tokens

LAST = jnp.iinfo(jnp.int32).max


class Cut(NamedTuple):
    """How one shard of a sequence is cut: static sizes, one for queries and one for keys."""

    query_blocks: int
    key_blocks: int
    rows: int  # batch rows worked on together
    heads: int  # key heads worked on together


def plan(q: Array, k: Array, block_size: int) -> Cut:
    """The fewest equal blocks of at most `block_size`, and as many heads at once as pay.

    On a CPU the scores of one product, and the three arrays like it in the backward pass, should
    stay in the cache of a core; an accelerator wants large products instead.
    """
    batch, key_heads = k.shape[0], k.shape[2]
    query_blocks, key_blocks = (-(-x.shape[1] // block_size) for x in (q, k))
    rows_of_block = q.shape[2] // key_heads * -(-q.shape[1] // query_blocks)
    scores = rows_of_block * -(-k.shape[1] // key_blocks)
    most = (2**14 if _platform() == "cpu" else 2**24) // scores
    heads = _largest_divisor(key_heads, most)
    rows = _largest_divisor(batch, most // heads) if heads == key_heads else 1
    return Cut(query_blocks, key_blocks, rows, heads)


def _platform() -> str:
    """What the code is traced for, which is not this machine where a mesh says otherwise."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _largest_divisor(number: int, most: int) -> int:
    return max(d for d in range(1, number + 1) if number % d == 0 and d <= max(most, 1))


def split_queries(q: Array, key_heads: int, cut: Cut) -> Array:
    """[B, T, H, D] to [row groups, head groups, blocks, n, M, D], padded at the end with zeros."""
    batch, _, heads, width = q.shape
    q = _pad(q, cut.query_blocks, 0)
    together = heads // key_heads
    q = q.reshape(
        *(batch // cut.rows, cut.rows, cut.query_blocks, -1),
        *(key_heads // cut.heads, cut.heads, together, width),
    ).transpose(0, 4, 2, 1, 5, 6, 3, 7)
    return q.reshape(*q.shape[:3], cut.rows * cut.heads, -1, width)


def join_queries(out: Array, key_heads: int, heads: int, cut: Cut) -> Array:
    """Undoes `split_queries`, all but the padding."""
    row_groups, head_groups, blocks, _, _, width = out.shape
    together = heads // key_heads
    out = out.reshape(
        *(row_groups, head_groups, blocks), *(cut.rows, cut.heads, together, -1, width)
    ).transpose(0, 3, 2, 6, 1, 4, 5, 7)
    return out.reshape(row_groups * cut.rows, -1, heads, width)


def split_keys(k: Array, cut: Cut) -> Array:
    """[B, T, Hkv, D] to [row groups, head groups, blocks, n, K, D], padded with zeros."""
    return split_queries(k, k.shape[2], cut._replace(query_blocks=cut.key_blocks))


def split_tokens(tokens: Tokens, blocks: int, rows: int = 1) -> Tokens:
    """[B or 1, T] to [row groups or 1, blocks, rows or 1, K], padded with padding tokens."""

    def split(x: Array) -> Array:
        x = _pad(x, blocks, PADDING)
        return x.reshape(-1, min(rows, x.shape[0]), blocks, x.shape[1] // blocks).swapaxes(1, 2)

    return jax.tree.map(split, tokens)


def _pad(x: Array, multiple: int, fill: int) -> Array:
    missing = [(0, 0)] * x.ndim
    missing[1] = (0, -x.shape[1] % multiple)
    return jnp.pad(x, missing, constant_values=fill)


class Pairs(NamedTuple):
    """Which block pairs to visit, decided from ranges, so masks exist for single pairs only."""

    count: Array  # int32 [query blocks]: how many key blocks each query block visits
    visit: Array  # int32 [query blocks, key blocks]: which; the first `count` matter
    full: Array  # bool [query blocks, key blocks]: all keys visible, no mask needed


def block_pairs(query: Tokens, key: Tokens) -> Pairs:
    """Classifies every pair of blocks [blocks, rows or 1, K] as skipped, full, or masked.

    A pair is skipped only if no batch row can see through it, and full only if all rows can.
    """
    q_low, q_high = (reduce(query.order, -1)[:, None] for reduce in (jnp.min, jnp.max))
    k_low, k_high = (reduce(key.order, -1)[None] for reduce in (jnp.min, jnp.max))
    earliest = jnp.where(key.order < 0, LAST, key.order).min(-1)[None]
    active = earliest <= q_high
    full = (k_low >= 0) & (k_high <= q_low)
    if query.segment is not None and key.segment is not None:
        q_first, q_last = (x[:, None] for x in _segment_range(query.segment, query.order))
        k_first, k_last = (x[None] for x in _segment_range(key.segment, key.order))
        active &= (q_first <= k_last) & (k_first <= q_last)
        full &= (q_first == q_last) & (k_first == k_last) & (q_first == k_first)
    active, full = active.any(-1), full.all(-1)
    count = active.sum(-1, dtype=jnp.int32)
    return Pairs(count, jnp.argsort(~active, axis=-1, stable=True), full)


def _segment_range(segment: Array, order: Array) -> tuple[Array, Array]:
    padding = order < 0
    return (
        jnp.where(padding, LAST, segment).min(-1),
        jnp.where(padding, -LAST, segment).max(-1),
    )
