"""Ring attention: queries stay, key and value blocks travel around the devices of a mesh axis.

A ring of one device is blockwise attention on that device. The forward pass sends K and V on
R − 1 times; the backward pass does so again with their float32 gradients aboard, which take two
more messages to come home. Each hop is one collective, started before the product that hides it.

Liu, Zaharia & Abbeel 2023, Ring Attention with Blockwise Transformers (arXiv 2310.01889).
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ring.blocks import join_queries, plan, split_keys, split_queries, split_tokens
from ring.blockwise import (
    KeyGradient,
    Keys,
    attend,
    attend_backward,
    empty_softmax,
    finish,
    rows,
)
from ring.mesh import vary_alike
from ring.tokens import PerToken, Tokens, check_operands, resolve, resolve_scale


class Ring(NamedTuple):
    """What is fixed while tracing: the axis to go around (None: no ring), its size, the scale."""

    axis: str | None
    size: int
    scale: float


def _forward(
    ring: Ring, q: Array, k: Array, v: Array, query: Tokens, key: Tokens
) -> tuple[Array, Array]:
    """Attention of blocked arrays (see `ring.blocks`) over all keys of the ring.

    Returns the output [..., M, D] in q's dtype and the log-sum-exp [..., M] in float32.
    """

    def hop(carry: tuple, _: None) -> tuple[tuple, None]:
        keys, state = carry
        following = rotate(keys, ring)
        return (following, attend(q, query, keys, state, ring.scale)), None

    carry = (Keys(k, v, key), empty_softmax(q))
    keys, state = _repeat(hop, carry, ring.size - 1)
    return finish(attend(q, query, keys, state, ring.scale), q.dtype)


def _save(ring: Ring, q: Array, k: Array, v: Array, query: Tokens, key: Tokens) -> tuple:
    out, lse = _forward(ring, q, k, v, query, key)
    # Named where they become residuals: a policy that saves both names needs no second forward.
    out = checkpoint_name(out, "attention_out")
    lse = checkpoint_name(lse, "attention_lse")
    return (out, lse), (q, k, v, query, key, out, lse)


def _backward(ring: Ring, saved: tuple, cotangent: tuple[Array, Array]) -> tuple:
    q, k, v, query, key, out, lse = saved
    prepared = rows(q, out, lse, *cotangent)

    # The gradient follows its keys one hop behind: while a product runs, the next keys and the
    # gradient of the ones before are both under way.
    def hop(carry: tuple, _: None) -> tuple[tuple, None]:
        keys, dq, gradient = carry
        following, gradient = rotate((keys, gradient), ring)
        dq, gradient = attend_backward(prepared, query, dq, keys, gradient, ring.scale)
        return (following, dq, gradient), None

    zero = KeyGradient(*(jnp.zeros_like(x.swapaxes(-1, -2), jnp.float32) for x in (k, v)))
    carry = (Keys(k, v, key), jnp.zeros_like(q, jnp.float32), zero)
    keys, dq, gradient = _repeat(hop, carry, ring.size - 1)
    gradient = rotate(gradient, ring)
    dq, gradient = attend_backward(prepared, query, dq, keys, gradient, ring.scale)
    dk, dv = (x.swapaxes(-1, -2) for x in rotate(gradient, ring))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


# Every option is resolved before this boundary, so the value is the same, bit for bit, with and
# without differentiation.
blocked_attention = jax.custom_vjp(_forward, nondiff_argnums=(0,))
blocked_attention.defvjp(_save, _backward)


def _repeat(hop: Callable, carry: tuple, times: int) -> tuple:
    """`lax.scan` without the loop where there is nothing to repeat."""
    return lax.scan(hop, carry, None, length=times)[0] if times else carry


def rotate(tree: Any, ring: Ring) -> Any:
    """Sends every array to the next device of the ring, all in one message, bit for bit.

    The message is made of words as wide as the narrowest element; wider elements are split, which
    no integer or float notices.
    """
    if ring.size == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    width = 8 * min(x.dtype.itemsize for x in leaves)
    parts = [_words(x, width) for x in leaves]
    following = [(i, (i + 1) % ring.size) for i in range(ring.size)]
    message = lax.ppermute(jnp.concatenate(parts), ring.axis, following)
    ends = itertools.accumulate(part.size for part in parts)
    pieces = jnp.split(message, list(ends)[:-1])
    return structure.unflatten(map(_from_words, pieces, leaves))


def _words(x: Array, width: int) -> Array:
    bits = 8 * x.dtype.itemsize
    whole = lax.bitcast_convert_type(x, f"uint{bits}").ravel()
    return jnp.concatenate([(whole >> low).astype(f"uint{width}") for low in range(0, bits, width)])


def _from_words(words: Array, like: Array) -> Array:
    bits, width = 8 * like.dtype.itemsize, 8 * words.dtype.itemsize
    parts = words.reshape(bits // width, *like.shape).astype(f"uint{bits}")
    whole = functools.reduce(jnp.bitwise_or, (parts[n] << n * width for n in range(bits // width)))
    return lax.bitcast_convert_type(whole, like.dtype)


def ring_attention_local(
    q: Array,
    k: Array,
    v: Array,
    *,
    axis: str | None,
    causal: bool = True,
    order: PerToken | None = None,
    segments: PerToken | None = None,
    block_size: int = 512,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """`ring.attention` inside an existing `jax.shard_map`: arguments and results are local shards.

    q [B, Tq/R, H, D], k and v [B, Tk/R, Hkv, D], order and segments [T/R] or [B, T/R], sharded over
    the manual mesh axis `axis` of size R (None: no ring, attention on this device alone). Nothing
    is padded here: a shard is at most one block long, or a multiple of `block_size`. The default
    order counts along the ring, device by device.

    Raises:
        ValueError: Shapes or dtypes disagree, or something does not divide.
    """
    check_operands(q, k, v)
    for name, length in (("query", q.shape[1]), ("key", k.shape[1])):
        if length > block_size and length % block_size:
            fitting = next(b for b in range(block_size, 0, -1) if length % b == 0)
            raise ValueError(
                f"the local {name} length {length} is not a multiple of block_size {block_size}; "
                f"pad it to {-(-length // block_size) * block_size}, or use block_size={fitting}"
            )
    ring = Ring(axis, 1 if axis is None else lax.axis_size(axis), resolve_scale(scale, q))
    start = 0 if axis is None else lax.axis_index(axis) * q.shape[1]
    query, key = resolve(q, k, causal, order, segments, start)
    out, lse = shard_attention(ring, q, k, v, query, key, block_size)
    return (out, lse) if return_lse else out


def shard_attention(
    ring: Ring, q: Array, k: Array, v: Array, query: Tokens, key: Tokens, block_size: int
) -> tuple[Array, Array]:
    """Output [B, Tq, H, D] and log-sum-exp [B, H, Tq] of this device's queries; any lengths.

    Shards are cut into the fewest equal blocks of at most `block_size`, padded where needed.
    """
    q, k, v, query, key = vary_alike((q, k, v, query, key))
    cut = plan(q, k, block_size)
    out, lse = blocked_attention(
        ring,
        split_queries(q, k.shape[2], cut),
        split_keys(k, cut),
        split_keys(v, cut),
        split_tokens(query, cut.query_blocks, cut.rows),
        split_tokens(key, cut.key_blocks, cut.rows),
    )
    length, heads = q.shape[1:3]
    out = join_queries(out, k.shape[2], heads, cut)[:, :length]
    lse = join_queries(lse[..., None], k.shape[2], heads, cut)[:, :length, :, 0]
    return out, lse.swapaxes(1, 2)
