"""Cutting sequences into blocks, and deciding which pairs of blocks meet.

Blocked arrays have five dimensions: loops run over the leading two, and one product works on the
trailing three:

    q, out  [groups, query blocks, n, M, D]
    k, v    [groups, key blocks,   n, K, D]
    tokens  [row groups or 1, blocks, rows or 1, K]

A group is some batch rows times some key heads, n in all, that are worked on together; groups of
the same rows follow each other. M = G · K are the rows of a query block for all G = H / Hkv query
heads that share a key head: grouped queries never repeat K or V.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ring.layout import LAST, blocks_in
from ring.tokens import PADDING, Tokens


class Cut(NamedTuple):
    """How one shard of a sequence is cut: static sizes, one for queries and one for keys."""

    query_blocks: int
    key_blocks: int
    rows: int  # batch rows worked on together
    heads: int  # key heads worked on together


def plan(q: Array, k: Array, block_size: int) -> Cut:
    """Equal blocks of at most `block_size` (see `blocks_in`), and as many heads at once as pay.

    On a CPU the scores of one product, and the three arrays like it in the backward pass, should
    stay in the cache of a core; an accelerator wants large products instead.
    """
    batch, key_heads = k.shape[0], k.shape[2]
    query_blocks, key_blocks = (blocks_in(x.shape[1], block_size) for x in (q, k))
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
    """[B, T, H, D] to [groups, blocks, n, M, D], padded at the end with zeros."""
    batch, _, heads, width = q.shape
    q = _pad(q, cut.query_blocks, 0)
    together = heads // key_heads
    q = q.reshape(
        *(batch // cut.rows, cut.rows, cut.query_blocks, -1),
        *(key_heads // cut.heads, cut.heads, together, width),
    ).transpose(0, 4, 2, 1, 5, 6, 3, 7)
    groups = batch // cut.rows * (key_heads // cut.heads)
    return q.reshape(groups, cut.query_blocks, cut.rows * cut.heads, -1, width)


def join_queries(out: Array, key_heads: int, heads: int, cut: Cut) -> Array:
    """Undoes `split_queries`, all but the padding."""
    groups, blocks, _, _, width = out.shape
    head_groups, together = key_heads // cut.heads, heads // key_heads
    out = out.reshape(
        *(groups // head_groups, head_groups, blocks),
        *(cut.rows, cut.heads, together, -1, width),
    ).transpose(0, 3, 2, 6, 1, 4, 5, 7)
    return out.reshape(groups // head_groups * cut.rows, -1, heads, width)


def split_keys(k: Array, cut: Cut) -> Array:
    """[B, T, Hkv, D] to [groups, blocks, n, K, D], padded at the end with zeros."""
    return split_queries(k, k.shape[2], cut._replace(query_blocks=cut.key_blocks))


def split_tokens(tokens: Tokens, blocks: int, rows: int = 1) -> Tokens:
    """[B or 1, T] to [row groups or 1, blocks, rows or 1, K], padded with padding tokens."""
    batch = max(x.shape[0] for x in jax.tree.leaves(tokens))

    def split(x: Array) -> Array:
        x = _pad(jnp.broadcast_to(x, (batch, x.shape[1])), blocks, PADDING)
        return x.reshape(-1, min(rows, batch), blocks, x.shape[1] // blocks).swapaxes(1, 2)

    return jax.tree.map(split, tokens)


def _pad(x: Array, multiple: int, fill: int) -> Array:
    missing = [(0, 0)] * x.ndim
    missing[1] = (0, -x.shape[1] % multiple)
    return jnp.pad(x, missing, constant_values=fill)


class Pairs(NamedTuple):
    """Which block pairs to visit, decided from ranges, so masks exist for single pairs only.

    Pairs that are visited are masked even where all keys are visible: a second loop without masks
    takes as long and compiles longer, and choosing in the loop costs a copy of the scores.
    """

    count: Array  # int32 [..., query blocks]: how many key blocks each query block visits
    visit: Array  # int32 [..., query blocks, key blocks]: which; the first `count` matter


def block_pairs(query: Tokens, key: Tokens) -> Pairs:
    """Decides which pairs of blocks [..., blocks, rows or 1, K] are visited.

    A pair is skipped only if no batch row can see through it.
    """
    latest = query.order.max(-1)[..., :, None, :]
    earliest = jnp.where(key.order < 0, LAST, key.order).min(-1)[..., None, :, :]
    active = earliest <= latest
    if query.segment is not None and key.segment is not None:
        q_range, k_range = segment_range(query), segment_range(key)
        q_first, q_last = (x[..., :, None, :] for x in q_range)
        k_first, k_last = (x[..., None, :, :] for x in k_range)
        active &= (q_first <= k_last) & (k_first <= q_last)
    active = active.any(-1)
    count = active.sum(-1, dtype=jnp.int32)
    return Pairs(count, jnp.argsort(~active, axis=-1, stable=True))


def segment_range(tokens: Tokens) -> tuple[Array, Array]:
    """First and last segment over the last dimension, among tokens that are no padding."""
    order, segment = tokens
    assert segment is not None
    return (
        jnp.where(order < 0, LAST, segment).min(-1),
        jnp.where(order < 0, -LAST, segment).max(-1),
    )
