"""The key/value cache of a rollout: it stays where it is, sharded over the ring by step.

Step s of the suffix belongs to device s mod R and to that device's row group s // R mod G, so
shards fill evenly, and a full cache begins again where its oldest steps lay. A row holds nothing
until it is written (order −1), and again when its trajectory is forgotten. Every layer has arrays
of its own: slices of one array for all would be copied at every step.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ring

_BATCH = ("data", "fsdp")
_KEYS = PartitionSpec(_BATCH, "tensor", None, "ring")
_VALUES = PartitionSpec(_BATCH, "tensor", "ring")
_ROWS = PartitionSpec("ring")
_NEW = PartitionSpec(_BATCH, "tensor")


class Cache(NamedTuple):
    """Keys and values of all layers, with what attention knows of each row.

    Attributes:
        key: of each layer ``[B, H, D, C]``, already rotated; C sharded over the ring. B is 1 for a
            prefix that all environments share.
        value: of each layer ``[B, H, C, D]``.
        order: ``[C]`` or ``[B, C]`` int32 token order; −1 holds nothing.
        segments: like ``order``, the trajectories, where they do not see each other; or None.
    """

    key: tuple[jax.Array, ...]
    value: tuple[jax.Array, ...]
    order: jax.Array
    segments: jax.Array | None

    def layer(self, index: int) -> ring.KV:
        """One layer's part."""
        return ring.KV(self.key[index], self.value[index], self.order, self.segments)

    def extended(self, key: jax.Array, value: jax.Array, dtype: Any) -> "Cache":
        """With the next layer, from keys and values ``[B, C, H, D]`` as attention takes them."""
        new = ring.KV.of(key.astype(dtype), value.astype(dtype), self.order)
        return self._replace(key=(*self.key, new.k), value=(*self.value, new.v))


def capacity(steps: int, tokens_per_step: int, ring_size: int) -> int:
    """Rows of a cache with room for ``steps`` steps: C = R · G · tokens_per_step."""
    return -(-steps // ring_size) * ring_size * tokens_per_step


def empty(
    mesh: Mesh,
    *,
    layers: int,
    batch: int,
    rows: int,
    heads: int,
    head_dim: int,
    dtype: str,
    segmented: bool,
) -> Cache:
    """A cache of ``rows`` rows (see `capacity`) that hold nothing."""

    def full(shape: tuple[int, ...], value: int, dtype: str, spec: PartitionSpec) -> jax.Array:
        where = NamedSharding(mesh, spec)
        return jax.jit(lambda: jnp.full(shape, value, jnp.dtype(dtype)), out_shardings=where)()

    shape = (batch, heads, head_dim, rows)
    turned = (batch, heads, rows, head_dim)
    return Cache(
        key=tuple(full(shape, 0, dtype, _KEYS) for _ in range(layers)),
        value=tuple(full(turned, 0, dtype, _VALUES) for _ in range(layers)),
        order=full((rows,), -1, "int32", _ROWS),
        segments=full((rows,), -1, "int32", _ROWS) if segmented else None,
    )


def placed(prefix: Cache) -> Cache:
    """A prefix as it lies: rows over the ring, and the batch over shards unless it is one chain."""
    batch = _BATCH if prefix.value[0].shape[0] > 1 else None
    keys, values = (PartitionSpec(batch, *spec[1:]) for spec in (_KEYS, _VALUES))
    put = jax.lax.with_sharding_constraint
    return prefix._replace(
        key=tuple(put(key, keys) for key in prefix.key),
        value=tuple(put(value, values) for value in prefix.value),
    )


@partial(jax.jit, static_argnums=(2, 3), donate_argnums=0)
def append(
    cache: Cache, new: Cache, first_slot: int, tokens_per_step: int, step: jax.Array
) -> Cache:
    """Write the rows of some slots of one step, in place.

    A program of its own: in one that reads the cache as well, compilers keep copies of it.

    Args:
        cache: is given up.
        new: the rows, C = t of consecutive slots, the same on all devices of the ring.
        first_slot: the slot of the first of them.
        tokens_per_step: rows of a whole step.
        step: int32 scalar, counted from the suffix's start.
    """

    def on_device(cache: Cache, new: Cache, step: jax.Array) -> Cache:
        put = partial(_put, step=step, first_slot=first_slot, tokens_per_step=tokens_per_step)
        return Cache(
            key=tuple(put(*each, axis=3) for each in zip(cache.key, new.key, strict=True)),
            value=tuple(put(*each, axis=2) for each in zip(cache.value, new.value, strict=True)),
            order=put(cache.order, new.order, axis=0),
            segments=None if new.segments is None else put(cache.segments, new.segments, axis=0),
        )

    def specs(key: Any, value: Any, rows: Any) -> Any:
        each = Cache((key,) * len(cache.key), (value,) * len(cache.key), rows, rows)
        return each if cache.segments is not None else each._replace(segments=None)

    stored, whole = specs(_KEYS, _VALUES, _ROWS), PartitionSpec()
    return jax.shard_map(
        on_device, in_specs=(stored, specs(_NEW, _NEW, whole), whole), out_specs=stored
    )(cache, new, step)


def _put(
    stored: Any, new: Any, *, axis: int, step: jax.Array, first_slot: int, tokens_per_step: int
) -> jax.Array:
    """On one device: the new rows where they belong along an axis, if they belong here."""
    size = jax.lax.axis_size("ring")
    groups = stored.shape[axis] // tokens_per_step
    row = step // size % groups * tokens_per_step + first_slot
    old = jax.lax.dynamic_slice_in_dim(stored, row, new.shape[axis], axis)
    mine = step % size == jax.lax.axis_index("ring")
    kept = jnp.where(mine, new.astype(stored.dtype), old)
    return jax.lax.dynamic_update_slice_in_dim(stored, kept, row, axis)


@partial(jax.jit, donate_argnums=0)
def forget(order: jax.Array, before: jax.Array | np.int32) -> jax.Array:
    """Row orders once tokens of an order below ``before`` are forgotten."""
    return jnp.where(order < before, -1, order)
