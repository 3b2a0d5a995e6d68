"""Blockwise feed-forward: the hidden activations of one block of tokens live at a time.

Liu & Abbeel 2023, Blockwise Parallel Transformer for Long Contexts (arXiv 2305.19370).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import eval_jaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ring.mesh import Axes, context_mesh


def blockwise_feedforward(
    fn: Callable[[Array], Array],
    x: Array,
    *,
    block_size: int,
    mesh: Mesh | AbstractMesh | None = None,
    axis: str = "ring",
    batch_axes: Sequence[str] = ("data", "fsdp"),
) -> Array:
    """Applies `fn`, which treats every token alike, to x [B, T, E], block by block, with remat.

    On a mesh (by default that of the context) the batch stays sharded over `batch_axes` and T over
    `axis`: activations do not move. What `fn` closes over, parameters above all, is gathered once
    before the first block, and its gradient is summed over devices once after the last; other mesh
    axes (`tensor`) remain with the compiler, as the parameters' own sharding wants.

    Args:
        fn: [B, K, E] to [B, K, F] for any B and K. It may read what it closes over, not change it.
        x: Tokens [B, T, E]; T need not divide by anything, B by the product of `batch_axes`.
        block_size: Upper bound on K.
        mesh: As in `ring.attention`, like the two that follow.
        axis: Mesh axis of the sequence.
        batch_axes: Mesh axes of the batch.

    Raises:
        ValueError: The batch does not divide over the mesh, or `block_size` is not positive.
    """
    if block_size < 1:
        raise ValueError(f"block_size {block_size} must be positive")
    given = mesh is not None
    mesh = context_mesh(mesh)
    axes = Axes.of(mesh, axis, batch_axes, None)
    axes.check(batch=x.shape[0])
    batch, length, width = x.shape
    local = -(-length // axes.ring_size)
    blocks = -(-local // block_size)
    size = -(-local // blocks)

    # Tracing turns what fn closes over into arguments. They get one copy a device, so that XLA
    # gathers them before the loop over blocks and sums their gradients after it, not in every turn.
    block = jax.ShapeDtypeStruct((batch // axes.batch_size, size, width), x.dtype)
    # The lambda is new every time: traces are cached by function, and what fn reads may change.
    traced = jax.make_jaxpr(lambda x: fn(x))(block)
    shards = (axes.batch_size, axes.ring_size)

    def place(x: Array) -> Array:
        """Keeps the first two dimensions, `shards`, on their devices."""
        if mesh is None:
            return x
        free = [P.UNCONSTRAINED] * (x.ndim - 2)
        spec = P(axes.batch, axes.sequence, *free)
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec) if given else spec)

    closed_over = [place(jnp.broadcast_to(c, (*shards, *jnp.shape(c)))) for c in traced.consts]

    @jax.vmap
    @jax.vmap
    def one_shard(x: Array, *closed_over: Array) -> Array:
        (y,) = eval_jaxpr(traced.jaxpr, closed_over, x)
        return y

    @jax.checkpoint
    def apply(_: None, x: Array) -> tuple[None, Array]:
        return None, one_shard(x, *closed_over)

    x = _repeat_last(x, axes.ring_size * local)
    x = x.reshape(shards[0], -1, shards[1], local, width).swapaxes(1, 2)
    x = _repeat_last(place(x), blocks * size)
    x = x.reshape(*shards, -1, blocks, size, width)
    y = lax.scan(apply, None, jnp.moveaxis(x, 3, 0))[1]
    y = jnp.moveaxis(y, 0, 3).reshape(*shards, -1, blocks * size, y.shape[-1])[..., :local, :]
    y = place(y).swapaxes(1, 2)
    return y.reshape(batch, -1, y.shape[-1])[:, :length]


def _repeat_last(x: Array, length: int) -> Array:
    """Pads T with copies of the last token: values that fn is sure to take."""
    missing = length - x.shape[-2]
    spread = [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)]
    return jnp.pad(x, spread, mode="edge") if missing else x
