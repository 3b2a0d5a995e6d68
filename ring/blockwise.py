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

    kv: Array  # [groups, key blocks, 2, n, K, D]: keys and values as one array, one message a hop
    tokens: Tokens

    @classmethod
    def of(cls, k: Array, v: Array, tokens: Tokens) -> "Keys":
        """From blocked keys and values [groups, key blocks, n, K, D]."""
        return cls(jnp.stack([k, v], axis=2), tokens)


class Softmax(NamedTuple):
    """Online softmax of some rows, float32: highest product, total weight, weighted values.

    The scale comes in only where the exponential is taken: no pass over the scores for itself.
    """

    highest: Array  # [..., M], not scaled
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


def finish(state: Softmax, scale: float, dtype: Any) -> tuple[Array, Array]:
    """Output in `dtype` and log-sum-exp; rows that saw no key get 0 and −inf."""
    seen = state.total > 0
    total = jnp.where(seen, state.total, 1)
    out = (state.values / total[..., None]).astype(dtype)
    return out, jnp.where(seen, state.highest * scale + jnp.log(total), -jnp.inf)


def attend(q: Array, query: Tokens, keys: Keys, state: Softmax, scale: float) -> Softmax:
    """Lets every query block see the given key blocks; returns the softmax state after."""
    pairs = block_pairs(query, keys.tokens)

    def block(at: Block, all_rows: Softmax) -> Softmax:
        q_block, tokens, visits = at.take(q), at.take_tokens(query), at.take_pairs(pairs)

        def step(n: Array, state: Softmax) -> Softmax:
            j = visits.visit[n]
            (k, v), key = at.take_keys(keys, j)
            scores = _scores(q_block, k, tokens, key)
            highest = jnp.maximum(state.highest, scores.max(-1))
            weights = jnp.exp((scores - highest[..., None]) * scale)
            shrink = jnp.exp((state.highest - highest) * scale)
            seen = _dot("nqk,nkd->nqd", weights.astype(v.dtype), v)
            return Softmax(
                highest,
                state.total * shrink + weights.sum(-1),
                state.values * shrink[..., None] + seen,
            )

        state = jax.tree.map(at.take, all_rows)
        state = lax.fori_loop(0, visits.count, step, state)
        return jax.tree.map(at.put, all_rows, state)

    return _over_blocks(block, q, pairs, state)


class Rows(NamedTuple):
    """What the backward pass needs of the query rows."""

    q: Array  # [..., M, D]
    dout: Array  # [..., M, D]
    lse: Array  # [..., M] float32, finite
    delta: Array  # [..., M] float32: rowsum(dout · out) − dlse


def rows(q: Array, out: Array, lse: Array, dout: Array, dlse: Array) -> Rows:
    """Prepares the query side of the backward pass, once for all hops."""
    # Rows without keys: every weight is exp(−inf), and what comes back for an lse of −inf may be
    # NaN, which times a weight of zero would be passed on to the keys.
    empty = lse == -jnp.inf
    delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    delta, lse = delta - jnp.where(empty, 0, dlse), jnp.where(empty, 0, lse)
    return Rows(q, dout, lse, delta)


def attend_backward(
    rows: Rows, query: Tokens, dq: Array, keys: Keys, scale: float
) -> tuple[Array, Array]:
    """Adds what the given key blocks contribute to dq (float32); also returns their own gradient.

    That is float32 [groups, key blocks, 2, n, D, K], transposed: XLA runs a product that contracts
    over the rows of the weights 3–5 times slower than the same product with the small operand
    transposed beforehand.
    """
    pairs = block_pairs(query, keys.tokens)

    def block(at: Block, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        all_dq, gradient = carry
        q, dout, lse, delta = (at.take(x) for x in rows)
        q_t, dout_t = q.swapaxes(-1, -2), dout.swapaxes(-1, -2)
        tokens, visits = at.take_tokens(query), at.take_pairs(pairs)

        def step(n: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            dq, gradient = carry
            j = visits.visit[n]
            (k, v), key = at.take_keys(keys, j)
            scores = _scores(q, k, tokens, key)
            weights = jnp.exp(scores * scale - lse[..., None])
            dweights = _dot("nqd,nkd->nqk", dout, v)
            dscores = (weights * (dweights - delta[..., None])).astype(k.dtype)
            dk_t = _dot("ndq,nqk->ndk", q_t, dscores)
            dv_t = _dot("ndq,nqk->ndk", dout_t, weights.astype(v.dtype))
            gradient = _add(gradient, jnp.stack([dk_t, dv_t]), at.group, j)
            return dq + _dot("nqk,nkd->nqd", dscores, k), gradient

        dq, gradient = lax.fori_loop(0, visits.count, step, (at.take(all_dq), gradient))
        return at.put(all_dq, dq), gradient

    gradient = jnp.zeros_like(keys.kv.swapaxes(-1, -2), jnp.float32)
    return _over_blocks(block, rows.q, pairs, (dq, gradient))


class Block(NamedTuple):
    """Where a query block is."""

    group: Array
    row_group: Array  # of tokens, which groups of heads share
    block: Array

    def take(self, x: Array) -> Array:
        """The block's part of `[groups, query blocks, ...]`."""
        return _take(x, self.group, self.block)

    def put(self, x: Array, part: Array) -> Array:
        """`x` with the block's part replaced, in place inside a loop."""
        return _put(x, part, self.group, self.block)

    def take_tokens(self, query: Tokens) -> Tokens:
        """The block's own tokens."""
        return jax.tree.map(lambda x: _take(x, self.row_group, self.block), query)

    def take_pairs(self, pairs: Pairs) -> Pairs:
        """Which key blocks the block visits."""
        return jax.tree.map(lambda x: _take(x, self.row_group, self.block), pairs)

    def take_keys(self, keys: Keys, j: Array) -> tuple[Array, Tokens]:
        """Keys and values [2, n, K, D] of the j-th key block, and its tokens."""
        tokens = jax.tree.map(lambda x: _take(x, self.row_group, j), keys.tokens)
        return _take(keys.kv, self.group, j), tokens


def _over_blocks(block: Callable[[Block, Any], Any], q: Array, pairs: Pairs, carry: Any) -> Any:
    """Runs `block` for one query block after the other; the carry is updated in place."""
    groups, blocks = q.shape[:2]
    # Groups that share tokens. Where one side's tokens are the same for all, that side has a single
    # row group, and taking another takes this one.
    heads = groups // pairs.count.shape[0]

    def step(n: Array, carry: Any) -> Any:
        group = n // blocks
        return block(Block(group, group // heads, n % blocks), carry)

    return lax.fori_loop(0, groups * blocks, step, carry)


def _scores(q: Array, k: Array, query: Tokens, key: Tokens) -> Array:
    """Products of one pair, [n, M, K] float32, not scaled; −inf where a query sees no key."""
    scores = _dot("nqd,nkd->nqk", q, k)
    seen = visible(query, key)  # [rows or 1, block, K], the same for all heads of a row
    shape = (seen.shape[0], -1, *seen.shape[1:])
    return jnp.where(seen[:, None], scores.reshape(shape), -jnp.inf).reshape(scores.shape)


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _take(x: Array, *index: Array | int) -> Array:
    """`x[index]`; of an index that is too large, the last one's."""
    start, rest = (*index, *[0] * (x.ndim - len(index))), x.shape[len(index) :]
    return lax.dynamic_slice(x, start, (*[1] * len(index), *rest)).reshape(rest)


def _put(x: Array, part: Array, *index: Array | int) -> Array:
    """`x` with `x[index]` replaced."""
    start = (*index, *[0] * part.ndim)
    return lax.dynamic_update_slice(x, part.reshape(*[1] * len(index), *part.shape), start)


def _add(x: Array, part: Array, *index: Array | int) -> Array:
    """`x` with `part` added to `x[index]`."""
    return _put(x, _take(x, *index) + part, *index)
