"""Exact attention between blocks: the online softmax forward, the flash-2 backward.

Scores exist for one pair of blocks at a time, and pairs that no query can see are never visited.

Blocked arrays carry the block index first. Batch and key heads are merged into N = B · Hkv; the
G = H / Hkv query heads that share a key head are merged into the rows of the query block,
M = G · K, so grouped queries never repeat K or V:

    q, out  [query blocks, N, M, D]        k, v  [key blocks, N, K, D]

Online softmax: Milakov & Gimelshein 2018 (arXiv 1805.02867); Rabe & Staats 2021 (2112.05682).
Backward: Dao 2023 (2307.08691), section 3.1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ring.tokens import PADDING, Tokens, visible

# Where the running maximum starts. Finite, so that −inf − FLOOR is −inf and never NaN: a row that
# has seen no key keeps weights of exactly zero.
FLOOR = -1e30
LAST = jnp.iinfo(jnp.int32).max


def split_queries(q: Array, blocks: int, key_heads: int) -> Array:
    """[B, T, H, D] to [blocks, N, M, D], padded at the end with zeros."""
    q = _cut(q, blocks, axis=1)
    batch, _, size, heads, width = q.shape
    q = q.reshape(batch, blocks, size, key_heads, heads // key_heads, width)
    return q.transpose(1, 0, 3, 4, 2, 5).reshape(blocks, batch * key_heads, -1, width)


def join_queries(out: Array, batch: int, heads: int) -> Array:
    """Undoes `split_queries`, all but the padding."""
    blocks, _, _, width = out.shape
    out = out.reshape(blocks, batch, heads, -1, width).transpose(1, 0, 3, 2, 4)
    return out.reshape(batch, -1, heads, width)


def split_keys(k: Array, blocks: int) -> Array:
    """[B, T, Hkv, D] to [blocks, N, K, D], padded at the end with zeros."""
    k = _cut(k, blocks, axis=1).transpose(1, 0, 3, 2, 4)
    return k.reshape(blocks, -1, *k.shape[3:])


def split_tokens(tokens: Tokens, blocks: int) -> Tokens:
    """[B or 1, T] to [blocks, B or 1, K]; what is added at the end is padding."""
    return jax.tree.map(lambda x: _cut(x, blocks, axis=1, fill=PADDING).swapaxes(0, 1), tokens)


def _cut(x: Array, blocks: int, axis: int, fill: int = 0) -> Array:
    """Cuts an axis into (blocks, size), with the smallest size that holds it."""
    size = -(-x.shape[axis] // blocks)
    missing = [(0, 0)] * x.ndim
    missing[axis] = (0, blocks * size - x.shape[axis])
    x = jnp.pad(x, missing, constant_values=fill)
    return x.reshape(*x.shape[:axis], blocks, size, *x.shape[axis + 1 :])


class Softmax(NamedTuple):
    """Online softmax of some rows, float32: highest score, total weight, weighted values."""

    highest: Array  # [..., M]
    total: Array  # [..., M]
    values: Array  # [..., M, D]


class Keys(NamedTuple):
    """Key blocks: what travels around a ring."""

    k: Array  # [key blocks, N, K, D]
    v: Array
    tokens: Tokens


class Pairs(NamedTuple):
    """Which block pairs to visit, decided from ranges, so masks exist for single pairs only."""

    count: Array  # int32 [query blocks]: how many key blocks each query block visits
    visit: Array  # int32 [query blocks, key blocks]: which; the first `count` matter
    full: Array  # bool [query blocks, key blocks]: all keys visible, no mask needed


def block_pairs(query: Tokens, key: Tokens) -> Pairs:
    """Classifies every pair of blocks: skipped, full, or masked.

    A pair is skipped only if no batch row can see through it, and full only if all rows can.
    """
    q_low, q_high = (reduce(query.order, -1)[:, None] for reduce in (jnp.min, jnp.max))
    k_low, k_high = (reduce(key.order, -1)[None] for reduce in (jnp.min, jnp.max))
    earliest = jnp.where(key.order < 0, LAST, key.order).min(-1)[None]
    active = earliest <= q_high
    full = (k_low >= 0) & (k_high <= q_low)
    if query.segment is not None and key.segment is not None:
        q_first, q_last = (bound[:, None] for bound in _segment_range(query.segment, query.order))
        k_first, k_last = (bound[None] for bound in _segment_range(key.segment, key.order))
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


def empty_softmax(q: Array) -> Softmax:
    """The state of rows that have seen no key; derived from q so that it varies over its axes."""
    rows = q[..., 0]
    return Softmax(
        jnp.full_like(rows, FLOOR, jnp.float32),
        jnp.zeros_like(rows, jnp.float32),
        jnp.zeros_like(q, jnp.float32),
    )


def finish(state: Softmax, dtype: Any) -> tuple[Array, Array]:
    """Output in `dtype` and log-sum-exp; rows that saw no key get 0 and −inf."""
    seen = state.total > 0
    total = jnp.where(seen, state.total, 1)
    out = (state.values / total[..., None]).astype(dtype)
    return out, jnp.where(seen, state.highest + jnp.log(total), -jnp.inf)


def attend(q: Array, query: Tokens, keys: Keys, state: Softmax, scale: float) -> Softmax:
    """Lets every query block see the given key blocks; returns the softmax state after."""
    pairs = block_pairs(query, keys.tokens)

    def row(_: None, x: tuple) -> tuple[None, Softmax]:
        q, query, state, pairs = x

        def step(n: Array, state: Softmax) -> Softmax:
            (k, v, key), full = _take((keys, pairs.full), pairs.visit[n])
            scores = _scores(q, k, query, key, full, scale)
            highest = jnp.maximum(state.highest, scores.max(-1))
            weights = jnp.exp(scores - highest[..., None])
            shrink = jnp.exp(state.highest - highest)
            seen = _dot("nqk,nkd->nqd", weights.astype(v.dtype), v)
            return Softmax(
                highest,
                state.total * shrink + weights.sum(-1),
                state.values * shrink[..., None] + seen,
            )

        return None, lax.fori_loop(0, pairs.count, step, state)

    return lax.scan(row, None, (q, query, state, pairs))[1]


class Rows(NamedTuple):
    """What the backward pass needs of the query rows.

    The transposed copies exist because XLA runs a product that contracts over the rows of the
    weights 3–5 times slower than the same product with the small operand transposed beforehand.
    """

    q: Array  # [query blocks, N, M, D]
    q_t: Array  # [query blocks, N, D, M]
    dout: Array
    dout_t: Array
    lse: Array  # [query blocks, N, M] float32, finite
    delta: Array  # [query blocks, N, M] float32: rowsum(dout · out) − dlse


def rows(q: Array, out: Array, lse: Array, dout: Array, dlse: Array) -> Rows:
    """Prepares the query side of the backward pass, once for all hops."""
    delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - dlse
    lse = jnp.where(lse == -jnp.inf, 0, lse)  # rows without keys: every weight is exp(−inf) anyway
    return Rows(q, q.swapaxes(-1, -2), dout, dout.swapaxes(-1, -2), lse, delta)


class KeyGradient(NamedTuple):
    """Gradients of key and value blocks, transposed: float32 [key blocks, N, D, K]."""

    dk_t: Array
    dv_t: Array


def attend_backward(
    rows: Rows,
    query: Tokens,
    dq: Array,
    keys: Keys,
    gradient: KeyGradient,
    scale: float,
) -> tuple[Array, KeyGradient]:
    """Adds what the given key blocks contribute to dq (float32) and to their own gradients."""
    pairs = block_pairs(query, keys.tokens)

    def row(gradient: KeyGradient, x: tuple) -> tuple[KeyGradient, Array]:
        rows, query, dq, pairs = x

        def step(n: Array, carry: tuple[Array, KeyGradient]) -> tuple[Array, KeyGradient]:
            dq, gradient = carry
            j = pairs.visit[n]
            (k, v, key), full = _take((keys, pairs.full), j)
            scores = _scores(rows.q, k, query, key, full, scale)
            weights = jnp.exp(scores - rows.lse[..., None])
            dweights = _dot("nqd,nkd->nqk", rows.dout, v)
            dscores = (weights * (dweights - rows.delta[..., None]) * scale).astype(k.dtype)
            dq += _dot("nqk,nkd->nqd", dscores, k)
            added = KeyGradient(
                dk_t=_dot("ndq,nqk->ndk", rows.q_t, dscores),
                dv_t=_dot("ndq,nqk->ndk", rows.dout_t, weights.astype(v.dtype)),
            )
            return dq, jax.tree.map(lambda all, one: all.at[j].add(one), gradient, added)

        dq, gradient = lax.fori_loop(0, pairs.count, step, (dq, gradient))
        return gradient, dq

    gradient, dq = lax.scan(row, gradient, (rows, query, dq, pairs))
    return dq, gradient


def _scores(q: Array, k: Array, query: Tokens, key: Tokens, full: Array, scale: float) -> Array:
    """Scaled scores of one pair, [N, M, K] float32; −inf where a query does not see a key."""
    scores = _dot("nqd,nkd->nqk", q, k) * scale

    def masked(scores: Array) -> Array:
        seen = visible(query, key)  # [B or 1, block, K], the same for all heads of a batch row
        shape = (seen.shape[0], -1, *seen.shape[1:])
        return jnp.where(seen[:, None], scores.reshape(shape), -jnp.inf).reshape(scores.shape)

    return lax.cond(full, lambda scores: scores, masked, scores)


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _take(blocks: Any, n: Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, n, keepdims=False), blocks)
