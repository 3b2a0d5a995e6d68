"""What attention knows of each token: its place in the causal order and its segment."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

# One array for queries and keys alike, or a (query, key) pair.
PerToken = ArrayLike | tuple[ArrayLike, ArrayLike]

PADDING = -1


class Tokens(NamedTuple):
    """Place in the causal order (−1: padding) and segment (None: all tokens are one) of tokens.

    int32 [B or 1, T]; blocked as in `ring.blocks`.
    """

    order: Array
    segment: Array | None


def visible(query: Tokens, key: Tokens) -> Array:
    """Which key each query sees: bool [B or 1, Tq, Tk]."""
    q, k = query.order[:, :, None], key.order[:, None, :]
    seen = (k >= 0) & (k <= q)
    if query.segment is None or key.segment is None:
        return seen
    return seen & (query.segment[:, :, None] == key.segment[:, None, :])


def resolve(
    q: Array,
    k: Array,
    causal: bool,
    order: PerToken | None,
    segments: PerToken | None,
    start: ArrayLike = 0,
) -> tuple[Tokens, Tokens]:
    """Query and key tokens from the arguments of an attention function.

    The default order counts from `start`. Full attention is causal attention among tokens that
    share one place.

    Raises:
        ValueError: A shape is not [T] or [B, T] of its side, or a dtype is not an integer.
    """
    lengths = q.shape[1], k.shape[1]
    if order is None:
        if causal and lengths[0] != lengths[1]:
            raise ValueError(
                f"causal attention of {lengths[0]} queries to {lengths[1]} keys has no default "
                "order; pass order=(query_order, key_order)"
            )
        order = start + jnp.arange(lengths[0]), start + jnp.arange(lengths[1])
    orders = _sides("order", order, q.shape[0], lengths)
    if not causal:
        orders = tuple(jnp.where(x < 0, PADDING, 0) for x in orders)
    both = (None, None)
    if segments is not None:
        both = _sides("segments", segments, q.shape[0], lengths)
    return Tokens(orders[0], both[0]), Tokens(orders[1], both[1])


def _sides(name: str, value: PerToken, batch: int, lengths: tuple[int, int]) -> list[Array]:
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name} is a tuple of {len(pair)}; expected an array, or a pair of them")
    sides = zip(("query", "key"), pair, lengths, strict=True)
    return [per_token(f"{name} of the {side}", x, batch, length) for side, x, length in sides]


def per_token(name: str, x: ArrayLike, batch: int, length: int) -> Array:
    """An argument [T] or [B, T] as int32 [1 or B, T].

    Raises:
        ValueError: It has another shape, or is not of integers.
    """
    x = jnp.asarray(x)
    if x.shape not in ((length,), (batch, length)):
        raise ValueError(
            f"{name} has shape {x.shape}, expected ({length},) or ({batch}, {length}); "
            "where queries and keys differ in length, give attention a (query, key) pair"
        )
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} is {x.dtype}, expected int32")
    return x.astype(jnp.int32).reshape(-1, length)


def check_operands(q: Array, k: Array, v: Array) -> None:
    """Refuses q, k, v that do not belong together.

    Raises:
        ValueError: Ranks, dtypes, batch, head dimension or head counts disagree.
    """
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape != v.shape:
        raise ValueError(f"expected q [B, Tq, H, D] and k, v [B, Tk, Hkv, D], got {shapes}")
    if not q.size or not k.size:
        raise ValueError(f"attention needs at least one query and one key, got {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"batch and head dimension of q and k must agree, got {shapes}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads do not share {k.shape[2]} key heads evenly; the number of "
            f"key heads must divide {q.shape[2]}"
        )
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(
            f"q, k, v must share one float dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them"
        )


def resolve_scale(scale: float | None, q: Array) -> float:
    """The factor on the scores, by default 1 / √D.

    Raises:
        ValueError: It is not positive.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not scale > 0:
        raise ValueError(f"scale {scale} must be positive")
    return scale
