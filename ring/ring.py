"""Ring attention: queries stay, key and value blocks travel around the devices of a mesh axis.

A ring of one device is blockwise attention on that device. The forward pass sends K and V, as one
array in their own dtype, on R − 1 times; the backward pass does so again, while their gradients
follow them in float32, one hop behind, and one hop further, home. Every message starts before a
product that hides it. With segments only as many hops are made as any query needs.

Liu, Zaharia & Abbeel 2023, Ring Attention with Blockwise Transformers (arXiv 2310.01889).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ring.blocks import (
    join_queries,
    plan,
    segment_range,
    split_keys,
    split_queries,
    split_tokens,
)
from ring.blockwise import Keys, Softmax, attend, attend_backward, empty_softmax, finish, rows
from ring.layout import LAST, blocks_in
from ring.mesh import vary_alike
from ring.tokens import PerToken, Tokens, check_operands, resolve, resolve_scale


class Ring(NamedTuple):
    """What is fixed while tracing: the axis to go around (None: no ring), its size, the scale."""

    axis: str | None
    size: int
    scale: float


def _forward(
    ring: Ring, q: Array, k: Array, v: Array, query: Tokens, key: Tokens, needed: Array | None
) -> tuple[Array, Array]:
    """Attention of blocked arrays (see `ring.blocks`) over the keys of the ring.

    `needed` is how many hops to make, the same on all devices; None for all R − 1. Returns the
    output [..., M, D] in q's dtype and the log-sum-exp [..., M] in float32.
    """

    def hop(_: Array, carry: tuple[Keys, Softmax]) -> tuple[Keys, Softmax]:
        keys, state = carry
        following = rotate(keys, ring)
        return following, attend(q, query, keys, state, ring.scale)

    hops = ring.size - 1 if needed is None else needed
    keys, state = _repeat(hops, hop, (Keys.of(k, v, key), empty_softmax(q)))
    return finish(attend(q, query, keys, state, ring.scale), ring.scale, q.dtype)


def _save(ring: Ring, *operands: Any) -> tuple:
    out, lse = _forward(ring, *operands)
    # Named where they become residuals: a policy that saves both names needs no second forward.
    out = checkpoint_name(out, "attention_out")
    lse = checkpoint_name(lse, "attention_lse")
    return (out, lse), (*operands, out, lse)


def _backward(ring: Ring, saved: tuple, cotangent: tuple[Array, Array]) -> tuple:
    q, k, v, query, key, needed, out, lse = saved
    prepared = rows(q, out, lse, *cotangent)
    keys, dq = Keys.of(k, v, key), jnp.zeros_like(q, jnp.float32)

    def contribute(dq: Array, keys: Keys) -> tuple[Array, Array]:
        return attend_backward(prepared, query, dq, keys, ring.scale)

    def around(hops: Array | int) -> tuple[Array, Array]:
        """At least one hop. While a product runs, keys and the gradient before travel."""

        def hop(_: Array, carry: tuple[Keys, Array, Array]) -> tuple[Keys, Array, Array]:
            keys, dq, gradient = carry
            following, arriving = rotate((keys, gradient), ring)
            dq, own = contribute(dq, keys)
            return following, dq, arriving + own

        following = rotate(keys, ring)
        carry = _repeat(hops - 1, hop, (following, *contribute(dq, keys)))
        last, dq_so_far, gradient = carry
        arriving = rotate(gradient, ring)
        whole, own = contribute(dq_so_far, last)
        return whole, _send_home(arriving + own, hops, ring)

    if needed is not None:
        # All devices decide alike.
        dq, gradient = lax.cond(needed > 0, around, lambda _: contribute(dq, keys), needed)
    else:
        dq, gradient = around(ring.size - 1) if ring.size > 1 else contribute(dq, keys)
    dk, dv = (gradient[:, :, i].swapaxes(-1, -2) for i in range(2))
    dq, dk = dq * ring.scale, dk * ring.scale
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


# Every option is resolved before this boundary, so the value is the same, bit for bit, with and
# without differentiation.
blocked_attention = jax.custom_vjp(_forward, nondiff_argnums=(0,))
blocked_attention.defvjp(_save, _backward)


def _repeat(times: Array | int, hop: Callable, carry: Any) -> Any:
    """`lax.fori_loop` without the loop where there is nothing to repeat."""
    if isinstance(times, int) and times == 0:
        return carry
    return lax.fori_loop(0, times, hop, carry)


def rotate(tree: Any, ring: Ring, hops: int = 1) -> Any:
    """Sends every array to the device that many hops on."""
    to = [(i, (i + hops) % ring.size) for i in range(ring.size)]
    return tree if ring.size == 1 else lax.ppermute(tree, ring.axis, to)


def _send_home(gradient: Array, hops: Array | int, ring: Ring) -> Array:
    """Sends gradients that are `hops` (at least one) from home the rest of the way around."""
    if isinstance(hops, int):
        return rotate(gradient, ring, ring.size - hops)
    ways = [lambda x, h=h: rotate(x, ring, ring.size - h) for h in range(1, ring.size)]
    return lax.switch(hops - 1, ways, gradient)  # all devices take the same way


def hops_needed(ring: Ring, query: Tokens, key: Tokens) -> Array:
    """How often keys must be sent on until no query anywhere can see any further: int32 scalar.

    Decided from each shard's range of orders and segments, [B or 1, T] tokens; the same on all
    devices.
    """
    own = jnp.where(key.order < 0, LAST, key.order).min(-1), *segment_range(key)
    shards = lax.all_gather(jnp.stack(jnp.broadcast_arrays(*own)), ring.axis)  # [R, 3, B or 1]
    earliest, first, last = shards.swapaxes(0, 1)
    q_first, q_last = segment_range(query)
    seen = (earliest <= query.order.max(-1)) & (q_first <= last) & (first <= q_last)
    distance = (lax.axis_index(ring.axis) - jnp.arange(ring.size)) % ring.size
    farthest = jnp.where(seen.any(-1), distance, 0).max()
    # Sorted: all processes must compile the same program, and sets of names have no order.
    return lax.pmax(farthest, tuple(sorted(jax.typeof(farthest).manual_axis_type.varying)))


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
    is padded here: a shard is at most one block long, or divides into `layout.blocks_in` blocks.
    The default order counts along the ring, device by device.

    Raises:
        ValueError: Shapes or dtypes disagree, something does not divide, operands are not sharded
            over `axis`, or JAX does not track which are replicated (`check_vma=False`): their
            gradients would be wrong.
    """
    check_operands(q, k, v)
    if axis is not None and axis not in jax.typeof(lax.axis_index(axis)).manual_axis_type.varying:
        raise ValueError(
            "ring_attention_local needs jax.shard_map(check_vma=True), its default: without, it "
            "can't tell operands that are the same on all devices, whose gradients must be summed"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if axis is not None and axis not in jax.typeof(x).manual_axis_type.varying:
            raise ValueError(
                f"{name} is the same on all devices of mesh axis {axis}; shard its sequence over "
                f"the axis (in_specs), or pass axis=None"
            )
    if block_size < 1:
        raise ValueError(f"block_size {block_size} must be positive")
    for name, length in (("query", q.shape[1]), ("key", k.shape[1])):
        blocks = blocks_in(length, block_size)
        if length % blocks:
            raise ValueError(
                f"the local {name} length {length} does not divide into {blocks} blocks of at most "
                f"block_size {block_size}; pad it to {-(-length // blocks) * blocks}"
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

    Shards are cut into equal blocks of at most `block_size`, padded where needed.
    """
    q, k, v, query, key = vary_alike((q, k, v, query, key))
    skips = ring.size > 1 and query.segment is not None and key.segment is not None
    needed = hops_needed(ring, query, key) if skips else None
    cut = plan(q, k, block_size)
    out, lse = blocked_attention(
        ring,
        split_queries(q, k.shape[2], cut),
        split_keys(k, cut),
        split_keys(v, cut),
        split_tokens(query, cut.query_blocks, cut.rows),
        split_tokens(key, cut.key_blocks, cut.rows),
        needed,
    )
    length, heads = q.shape[1:3]
    out = join_queries(out, k.shape[2], heads, cut)[:, :length]
    lse = join_queries(lse[..., None], k.shape[2], heads, cut)[:, :length, :, 0]
    return out, lse.swapaxes(1, 2)
