"""The key/value cache of a rollout: it stays where it is, sharded over the ring by step.

Step s of the suffix belongs to device s mod R and to that device's row group s // R, so shards
fill evenly. A row's token order follows from where it lies, so it is fixed when the cache is
made: rows not written yet have an order beyond every query and are never attended to.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ring

_ROWS = PartitionSpec(None, ("data", "fsdp"), "ring", "tensor")
_NEW = PartitionSpec(("data", "fsdp"), None, "tensor")


class Cache(NamedTuple):
    """Keys and values of all layers, with the token order of each row.

    Attributes:
        key: ``[L, B, C, H, D]``, keys already rotated; C sharded over the ring.
        value: ``[L, B, C, H, D]``.
        order: ``[C]`` or ``[B, C]`` int32 token order.
        segments: like ``order``, the trajectories, where they do not see each other; or None.
    """

    key: jax.Array
    value: jax.Array
    order: jax.Array
    segments: jax.Array | None

    def layer(self, index: jax.Array) -> ring.KV:
        """One layer's part."""
        return ring.KV(self.key[index], self.value[index], self.order, self.segments)


def row_order(steps: int, tokens_per_step: int, ring_size: int, first_step: int) -> np.ndarray:
    """Token order of every row of a cache for ``steps`` steps that follow ``first_step`` others.

    Returns:
        ``[C]`` int32 with C = R · ceil(steps / R) · tokens_per_step, device after device.
    """
    groups = -(-steps // ring_size)
    step = np.arange(groups)[None, :, None] * ring_size + np.arange(ring_size)[:, None, None]
    slot = np.arange(tokens_per_step)
    return ((first_step + step) * tokens_per_step + slot).reshape(-1).astype(np.int32)


def empty(
    mesh: Mesh,
    *,
    layers: int,
    batch: int,
    steps: int,
    tokens_per_step: int,
    heads: int,
    head_dim: int,
    dtype: str,
    first_step: int = 0,
    episode: int | None = None,
) -> Cache:
    """A cache with room for ``steps`` steps after ``first_step`` steps kept elsewhere.

    With ``episode``, the steps of one, those of different episodes do not see each other.
    """
    order = row_order(steps, tokens_per_step, mesh.shape["ring"], first_step)
    rows, whole = NamedSharding(mesh, _ROWS), NamedSharding(mesh, PartitionSpec("ring"))
    zeros = jax.jit(
        lambda: jnp.zeros((layers, batch, len(order), heads, head_dim), jnp.dtype(dtype)),
        out_shardings=rows,
    )
    segments = None
    if episode is not None:
        segments = jax.device_put(order // (episode * tokens_per_step), whole)
    return Cache(zeros(), zeros(), jax.device_put(order, whole), segments)


def write(
    stored: jax.Array,
    new: jax.Array,
    *,
    layer: jax.Array,
    step: jax.Array,
    first_slot: int,
    tokens_per_step: int,
) -> jax.Array:
    """Put the new rows of one step into one layer, in place where the buffer is donated.

    Args:
        stored: ``[L, B, C, H, D]``, sharded as `empty` makes it.
        new: ``[B, t, H, D]``, rows of t consecutive slots of the step, replicated over the ring.
        layer: int32 scalar.
        step: int32 scalar, counted from the suffix's start.
        first_slot: slot of the first new row.
        tokens_per_step: rows of a whole step.
    """

    def on_device(stored: jax.Array, new: jax.Array, place: jax.Array) -> jax.Array:
        layer, step = place[0], place[1]
        size = jax.lax.axis_size("ring")
        row = (step // size) * tokens_per_step + first_slot
        start = (layer, 0, row, 0, 0)
        old = jax.lax.dynamic_slice(stored, start, (1, *new.shape))
        mine = step % size == jax.lax.axis_index("ring")
        return jax.lax.dynamic_update_slice(stored, jnp.where(mine, new[None], old), start)

    place = jnp.stack([layer, step]).astype(jnp.int32)
    return jax.shard_map(on_device, in_specs=(_ROWS, _NEW, PartitionSpec()), out_specs=_ROWS)(
        stored, new.astype(stored.dtype), place
    )
