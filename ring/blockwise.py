"""Exact attention between blocks: the online softmax forward, the flash-2 backward.

Scores exist for one pair of blocks at a time, and pairs that no query can see are never visited.
Shapes are those of `ring.blocks`.

Online softmax: Milakov & Gimelshein 2018 (arXiv 1805.02867); Rabe & Staats 2021 (2112.05682).
Backward: Dao 2023 (2307.08691), section 3.1.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ring.blocks import Pairs, block_pairs
from ring.tokens import Tokens, visible

# Where the running maximum starts. Finite, so that −inf − FLOOR is −inf and never NaN: a row that
# has seen no key keeps weights of exactly zero.
FLOOR = -1e30


class Keys(NamedTuple):
    """Key blocks: what travels around a ring."""

    k: Array
    v: Array
    tokens: Tokens


class Softmax(NamedTuple):
    """Online softmax of some rows, float32: highest score, total weight, weighted values."""

    highest: Array  # [..., M]
    total: Array  # [..., M]
    values: Array  # [..., M, D]


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

    def heads(x: tuple, query: Tokens, key: Tokens, pairs: Pairs) -> Softmax:
        q, k, v, state = x

        def block(x: tuple) -> Softmax:
            q, query, state, pairs = x

            def step(n: Array, state: Softmax) -> Softmax:
                k_block, v_block, key_block, full = _take((k, v, key, pairs.full), pairs.visit[n])
                scores = _scores(q, k_block, query, key_block, full, scale)
                highest = jnp.maximum(state.highest, scores.max(-1))
                weights = jnp.exp(scores - highest[..., None])
                shrink = jnp.exp(state.highest - highest)
                seen = _dot("nqk,nkd->nqd", weights.astype(v.dtype), v_block)
                return Softmax(
                    highest,
                    state.total * shrink + weights.sum(-1),
                    state.values * shrink[..., None] + seen,
                )

            return lax.fori_loop(0, pairs.count, step, state)

        return lax.map(block, (q, query, state, pairs))

    return _over_groups(heads, (q, keys.k, keys.v, state), query, keys.tokens)


class Rows(NamedTuple):
    """What the backward pass needs of the query rows.

    The transposed copies exist because XLA runs a product that contracts over the rows of the
    weights 3–5 times slower than the same product with the small operand transposed beforehand.
    """

    q: Array  # [..., M, D]
    q_t: Array  # [..., D, M]
    dout: Array
    dout_t: Array
    lse: Array  # [..., M] float32, finite
    delta: Array  # [..., M] float32: rowsum(dout · out) − dlse


def rows(q: Array, out: Array, lse: Array, dout: Array, dlse: Array) -> Rows:
    """Prepares the query side of the backward pass, once for all hops."""
    delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - dlse
    lse = jnp.where(lse == -jnp.inf, 0, lse)  # rows without keys: every weight is exp(−inf) anyway
    return Rows(q, q.swapaxes(-1, -2), dout, dout.swapaxes(-1, -2), lse, delta)


class KeyGradient(NamedTuple):
    """Gradients of key and value blocks, transposed: float32 [..., D, K]."""

    dk_t: Array
    dv_t: Array


def attend_backward(
    rows: Rows, query: Tokens, dq: Array, keys: Keys, gradient: KeyGradient, scale: float
) -> tuple[Array, KeyGradient]:
    """Adds what the given key blocks contribute to dq (float32) and to their own gradients."""

    def heads(x: tuple, query: Tokens, key: Tokens, pairs: Pairs) -> tuple[Array, KeyGradient]:
        rows, dq, k, v, gradient = x

        def block(gradient: KeyGradient, x: tuple) -> tuple[KeyGradient, Array]:
            rows, query, dq, pairs = x

            def step(n: Array, carry: tuple[Array, KeyGradient]) -> tuple[Array, KeyGradient]:
                dq, gradient = carry
                j = pairs.visit[n]
                k_block, v_block, key_block, full = _take((k, v, key, pairs.full), j)
                scores = _scores(rows.q, k_block, query, key_block, full, scale)
                weights = jnp.exp(scores - rows.lse[..., None])
                dweights = _dot("nqd,nkd->nqk", rows.dout, v_block)
                dscores = (weights * (dweights - rows.delta[..., None]) * scale).astype(k.dtype)
                added = KeyGradient(
                    dk_t=_dot("ndq,nqk->ndk", rows.q_t, dscores),
                    dv_t=_dot("ndq,nqk->ndk", rows.dout_t, weights.astype(v.dtype)),
                )
                gradient = jax.tree.map(lambda all, one: all.at[j].add(one), gradient, added)
                return dq + _dot("nqk,nkd->nqd", dscores, k_block), gradient

            dq, gradient = lax.fori_loop(0, pairs.count, step, (dq, gradient))
            return gradient, dq

        gradient, dq = lax.scan(block, gradient, (rows, query, dq, pairs))
        return dq, gradient

    return _over_groups(heads, (rows, dq, keys.k, keys.v, gradient), query, keys.tokens)


def _over_groups(heads: Callable, arrays: tuple, query: Tokens, key: Tokens) -> Any:
    """Runs `heads` for every group of batch rows and, within, every group of heads."""
    groups = jax.tree.leaves(arrays)[0].shape[0]
    tokens = jax.tree.map(lambda x: jnp.broadcast_to(x, (groups, *x.shape[1:])), (query, key))

    def row_group(x: tuple) -> Any:
        arrays, (query, key) = x
        pairs = block_pairs(query, key)
        return lax.map(lambda arrays: heads(arrays, query, key, pairs), arrays)

    return lax.map(row_group, (arrays, tokens))


def _scores(q: Array, k: Array, query: Tokens, key: Tokens, full: Array, scale: float) -> Array:
    """Scaled scores of one pair, [n, M, K] float32; −inf where a query does not see a key."""
    scores = _dot("nqd,nkd->nqk", q, k) * scale

    def masked(scores: Array) -> Array:
        seen = visible(query, key)  # [rows or 1, block, K], the same for all heads of a row
        shape = (seen.shape[0], -1, *seen.shape[1:])
        return jnp.where(seen[:, None], scores.reshape(shape), -jnp.inf).reshape(scores.shape)

    return lax.cond(full, lambda scores: scores, masked, scores)


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _take(blocks: Any, n: Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, n, keepdims=False), blocks)
