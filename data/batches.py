"""The batch: arrays over environment steps, laid out and placed on the mesh."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ring import layout

PADDING = -1
"""`order` of a step that attends to nothing and is attended by nothing."""

Layout = Literal["zigzag", "contiguous"]

Part = Callable[[np.ndarray, np.ndarray], "Batch"]
"""(rows int [B'], steps int [S']) → that part of a batch; steps beyond the end are padding."""


class Batch(NamedTuple):
    """Chains as arrays over steps; with ``chunk`` c, a step is c environment steps.

    Attributes:
        return_to_go: ``[B, S, 1]`` float32, at the start of the step, scaled.
        observation: ``[B, S, O]`` float32, standardised, at the start of the step.
        action: ``[B, S, c·A]`` float32, what is predicted.
        reward: ``[B, S, 1]`` float32, summed over the step, scaled by `packing.token_reward`.
        completion: ``[B, S, 1]`` float32, 1 where a trajectory has reached its target and ends.
        previous_action: ``[B, S, c·A]`` float32, the action of the step before.
        previous_reward: ``[B, S, 1]`` float32, the reward of the step before.
        previous_completion: ``[B, S, 1]`` float32, the flag of the step before.
        timestep: ``[B, S]`` int32, index of the step within its trajectory.
        trajectory: ``[B, S]`` int32, index of the trajectory within its chain.
        order: ``[B, S]`` int32, index of the step within its chain; −1 is padding.
        chain: ``[B, S]`` int32, index of the chain within the whole batch.
        loss_mask: ``[B, S]`` float32, 1 where the action enters the loss.
    """

    return_to_go: Any
    observation: Any
    action: Any
    reward: Any
    completion: Any
    previous_action: Any
    previous_reward: Any
    previous_completion: Any
    timestep: Any
    trajectory: Any
    order: Any
    chain: Any
    loss_mask: Any


def stack(rows: Sequence[Batch]) -> Batch:
    """Stack equally long single-chain batches along a new leading B."""
    return Batch(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))


def take(batch: Batch, rows: np.ndarray, steps: np.ndarray) -> Batch:
    """Part of a host batch; steps beyond its end are padding: zeros, `order` −1 and no loss."""
    inside = steps < batch.order.shape[1]

    def part(name: str, array: np.ndarray) -> np.ndarray:
        found = np.asarray(array)[np.ix_(rows, np.where(inside, steps, 0))]
        found[:, ~inside] = PADDING if name == "order" else 0
        return found

    return Batch(**{name: part(name, array) for name, array in batch._asdict().items()})


def positions(steps: int, ring_size: int, how: Layout) -> np.ndarray:
    """Which step lies where along the ring: int ``[S]``, S at least ``steps``, the rest padding.

    Under a causal mask `zigzag` balances the devices' work; where trajectories do not see each
    other, `contiguous` does (see `ring.layout`).
    """
    if ring_size == 1:
        return np.arange(steps)
    return getattr(layout, how)(padded(steps, ring_size), ring_size)


def padded(steps: int, ring_size: int) -> int:
    """S: so many steps, and what is missing to two chunks of equal length for each device."""
    return steps if ring_size == 1 else -(-steps // (2 * ring_size)) * 2 * ring_size


def sharding(mesh: Mesh) -> NamedSharding:
    """How every array of a batch lies on the mesh: B over data and fsdp, S over the ring."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "ring"))


def place(batch: Batch, mesh: Mesh, how: Layout = "zigzag") -> Batch:
    """Put a host batch on the mesh, laid out along the ring; see `place_parts`."""
    rows, steps = batch.order.shape
    return place_parts(lambda rows, steps: take(batch, rows, steps), rows, steps, mesh, how)


def place_parts(part: Part, rows: int, steps: int, mesh: Mesh, how: Layout = "zigzag") -> Batch:
    """Build a batch where it belongs: of ``rows`` chains and ``steps`` steps only what lies here.

    Every process of a run calls this for the whole batch and builds the rows and steps of its own
    devices.

    Args:
        part: builds rows × steps of the batch.
        rows: B.
        steps: of the longest chain; S is padded so that it divides over the ring.
        mesh: of all processes.
        how: the steps' layout along the ring.

    Raises:
        ValueError: the number of chains does not divide over the data and fsdp axes.
    """
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % shards:
        raise ValueError(
            f"{rows} chains do not divide over mesh.data × mesh.fsdp = {shards}; "
            f"use a multiple, such as {-(-rows // shards) * shards}"
        )
    order, where = positions(steps, mesh.shape["ring"], how), sharding(mesh)
    shape = (rows, len(order))
    here: Any = where.addressable_devices_indices_map(shape).values()
    mine = []
    for axis, size in enumerate(shape):
        needed = np.zeros(size, bool)
        for index in here:
            needed[index[axis]] = True
        mine.append(np.flatnonzero(needed))
    local = part(mine[0], order[mine[1]])
    if where.is_fully_addressable:
        return jax.device_put(local, where)

    def on_device(array: np.ndarray) -> jax.Array:
        def of(index: Any) -> np.ndarray:
            rows, steps = (
                slice(*np.searchsorted(mine[axis], index[axis].indices(shape[axis])[:2]))
                for axis in (0, 1)
            )
            return array[rows, steps]

        return jax.make_array_from_callback((*shape, *array.shape[2:]), where, of)

    return Batch(*(on_device(array) for array in local))
