"""The front door: exact attention over any mesh, whichever way it is computed."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from ring.dense import dense
from ring.mesh import Axes, context_mesh
from ring.ring import Ring, shard_attention
from ring.tokens import PADDING, PerToken, Tokens, check_operands, resolve, resolve_scale

Implementation = Literal["dense", "blockwise", "ring"]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    implementation: Implementation = "dense",
    causal: bool = True,
    order: PerToken | None = None,
    segments: PerToken | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis: str = "ring",
    batch_axes: Sequence[str] = ("data", "fsdp"),
    head_axis: str = "tensor",
    block_size: int = 512,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Exact softmax attention; every implementation computes the same function and gradients.

    - `dense`: all scores at once, memory in Tq · Tk. The reference.
    - `blockwise`: scores of one pair of blocks at a time; pairs nobody can see are skipped.
    - `ring`: blockwise, with the sequence sharded over the mesh axis `axis`; K and V travel.

    Statistics and accumulators are float32 whatever the dtype of the operands, which is also that
    of the output and of the gradients. On a mesh all of them run fully manual (`jax.shard_map`):
    batch over `batch_axes`, heads over `head_axis`, the sequence over `axis`; axes that the mesh
    lacks are ignored. `dense` and `blockwise` see the whole sequence on each device.

    Args:
        q: Queries [B, Tq, H, D].
        k: Keys [B, Tk, Hkv, D]; Hkv divides H, and H / Hkv query heads share a key head.
        v: Values, like `k`.
        implementation: How to compute it.
        causal: A query sees keys of its own and lower order only. False: of any order.
        order: int32 [T] or [B, T], unique, by default 0 … T−1; −1 is padding, which sees nothing
            and is seen by nothing. A (query, key) pair where Tq ≠ Tk.
        segments: int32 like `order`: tokens see only tokens of their own segment.
        mesh: By default the mesh of the context (`jax.set_mesh`), or else one device.
        axis: Mesh axis of the sequence.
        batch_axes: Mesh axes of the batch, which their product must divide.
        head_axis: Mesh axis of the heads; it must divide H and Hkv.
        block_size: Upper bound on the block length. Lengths need not divide: they are padded.
        scale: Factor on the scores, by default 1 / √D.
        return_lse: Also return the log-sum-exp of the scores, differentiable too.

    Returns:
        Output [B, Tq, H, D]; with `return_lse` also float32 [B, H, Tq]. A query that sees no key
        gets output 0, log-sum-exp −inf and no gradient.

    Raises:
        ValueError: Shapes, dtypes or mesh axes do not fit; the message says what would.
    """
    check_operands(q, k, v)
    if implementation not in ("dense", "blockwise", "ring"):
        raise ValueError(f"implementation {implementation!r} is not one of dense, blockwise, ring")
    if block_size < 1:
        raise ValueError(f"block_size {block_size} must be positive")
    query, key = resolve(q, k, causal, order, segments)
    mesh = context_mesh(mesh)
    axes = Axes.of(mesh, axis if implementation == "ring" else None, batch_axes, head_axis)
    axes.check(batch=q.shape[0], heads=q.shape[2], key_heads=k.shape[2])
    ring = Ring(axes.sequence, axes.ring_size, resolve_scale(scale, q))

    def shard(q: Array, k: Array, v: Array, query: Tokens, key: Tokens) -> tuple[Array, Array]:
        if implementation == "dense":
            return dense(q, k, v, query, key, ring.scale)
        return shard_attention(ring, q, k, v, query, key, block_size)

    length = q.shape[1]
    out, lse = _on_mesh(shard, mesh, axes)(q, k, v, query, key)
    out, lse = out[:, :length], lse[:, :, :length]
    return (out, lse) if return_lse else out


def _on_mesh(shard: Callable, mesh: Mesh | AbstractMesh | None, axes: Axes) -> Callable:
    """Runs `shard` on every device's part, sequences padded to divide over the ring."""
    if mesh is None:
        return shard

    def run(q: Array, k: Array, v: Array, query: Tokens, key: Tokens) -> tuple[Array, Array]:
        operands = [_pad(x, axes.ring_size, 0) for x in (q, k, v)]
        tokens = jax.tree.map(lambda x: _pad(x, axes.ring_size, PADDING), (query, key))
        array = P(axes.batch, axes.sequence, axes.heads, None)
        specs = jax.tree.map(
            lambda x: P(axes.batch if x.shape[0] > 1 else None, axes.sequence), tokens
        )
        return jax.shard_map(
            shard,
            mesh=mesh,
            in_specs=(array, array, array, *specs),
            out_specs=(array, P(axes.batch, axes.heads, axes.sequence)),
        )(*operands, *tokens)

    return run


def _pad(x: Array, multiple: int, fill: int) -> Array:
    missing = -x.shape[1] % multiple
    if not missing:
        return x
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
