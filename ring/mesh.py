"""The device mesh: four named axes, each of size 1 unless asked for."""

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh

from ring import torus

Tree = TypeVar("Tree")

AXES = ("data", "fsdp", "ring", "tensor")


def simulate_devices(count: int) -> None:
    """Splits the CPU into simulated devices, once JAX starts.

    XLA's pool has a thread for each core. Each device occupies one while it runs, and what no free
    thread ever picks up, some 15 KB for each turn of a loop, is held until the program ends: a
    training step on 512,000 tokens ran out of 24 GB that way. So the pool gets a thread more for
    each device.

    Raises:
        RuntimeError: JAX has started.
    """
    jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("PJRT_NPROC", str(count + (os.cpu_count() or 1)))


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    ring: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Arranges devices along the axes `data`, `fsdp`, `ring` and `tensor`, all `AxisType.Auto`.

    Neighbours along `ring` are linked chips on a TPU slice (`ring.torus`). Elsewhere neighbours
    along `tensor`, then `ring`, are neighbours in the device list, so the axes that talk most stay
    closest. Without `devices` the first `data · fsdp · ring · tensor` of `jax.devices()`
    are taken; with `devices` the product must be their number.

    Raises:
        ValueError: An axis is not positive, or the sizes do not fit the devices.
    """
    sizes = dict(zip(AXES, (data, fsdp, ring, tensor), strict=True))
    for axis, size in sizes.items():
        if size < 1:
            raise ValueError(f"mesh axis {axis}={size}: sizes are positive, 1 turns an axis off")
    wanted = math.prod(sizes.values())
    product = " · ".join(f"{axis} {size}" for axis, size in sizes.items())
    if devices is None:
        devices = jax.devices()
        if len(devices) < wanted:
            raise ValueError(
                f"a mesh of {product} needs {wanted} devices, {len(devices)} are here; shrink an "
                f"axis, or simulate devices on a CPU with ring.simulate_devices({wanted})"
            )
        devices = devices[:wanted]
    if len(devices) != wanted:
        raise ValueError(
            f"a mesh of {product} needs {wanted} devices, {len(devices)} were given; "
            "change an axis so that the product matches"
        )
    boxes = torus.boxes(devices, ring)
    if boxes is None:
        arranged = np.array(devices).reshape(data, fsdp, ring, tensor)
    else:
        arranged = boxes.reshape(data, fsdp, tensor, ring).swapaxes(2, 3)
    return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def context_mesh(mesh: Mesh | AbstractMesh | None = None) -> Mesh | AbstractMesh | None:
    """`mesh`, or else the mesh of the context (`jax.set_mesh`), or None for a single device.

    Raises:
        ValueError: The caller is already inside a `jax.shard_map`.
    """
    current = jax.sharding.get_abstract_mesh()
    if current.manual_axes:
        raise ValueError(
            f"already inside a shard_map over {', '.join(current.manual_axes)}: attention places "
            "its own; inside one call ring.ring_attention_local"
        )
    if mesh is None:
        mesh = None if current.empty else current
    return mesh


class Axes(NamedTuple):
    """Which mesh axes carry what; those that the mesh lacks or has with size 1 do not count."""

    sequence: str | None
    batch: tuple[str, ...] | None
    heads: str | None
    ring_size: int
    batch_size: int
    heads_size: int

    @classmethod
    def of(
        cls,
        mesh: Mesh | AbstractMesh | None,
        sequence: str | None,
        batch: Sequence[str],
        heads: str | None,
    ) -> "Axes":
        """Finds the axes in the mesh."""
        sizes = {} if mesh is None else {a: n for a, n in mesh.shape.items() if n > 1}
        found = tuple(axis for axis in batch if axis in sizes)
        return cls(
            sequence=sequence if sequence in sizes else None,
            batch=found or None,
            heads=heads if heads in sizes else None,
            ring_size=sizes.get(sequence, 1),
            batch_size=math.prod(sizes[axis] for axis in found),
            heads_size=sizes.get(heads, 1),
        )

    def check(self, batch: int, heads: int = 0, key_heads: int = 0) -> None:
        """Refuses sizes that do not divide over the mesh.

        Raises:
            ValueError: Names the field, its value, the divisor, and a value that works.
        """
        for field, value, axis, divisor in (
            ("batch", batch, "·".join(self.batch or ()), self.batch_size),
            ("query heads", heads, self.heads, self.heads_size),
            ("key heads", key_heads, self.heads, self.heads_size),
        ):
            if value % divisor:
                raise ValueError(
                    f"{field} {value} does not divide over mesh axis {axis} of size {divisor}; "
                    f"{-(-value // divisor) * divisor} would"
                )


def vary_alike(tree: Tree) -> Tree:
    """Lets every array vary over all mesh axes that any of them varies over.

    The gradient of an array that was the same on all devices of an axis is thereby summed over it.
    """
    over = [jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)]
    axes = frozenset().union(*over)

    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)
