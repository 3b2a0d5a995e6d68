"""The batch: arrays over environment steps, padded and placed on the mesh."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PADDING = -1
"""`order` of a step that attends to nothing and is attended by nothing."""


class Batch(NamedTuple):
    """Chains as arrays over steps; with ``chunk`` c, a step is c environment steps.

    Attributes:
        return_to_go: ``[B, S, 1]`` float32, at the start of the step, scaled.
        observation: ``[B, S, O]`` float32, standardised, at the start of the step.
        action: ``[B, S, c·A]`` float32, what is predicted.
        reward: ``[B, S, 1]`` float32, summed over the step, scaled by `packing.token_reward`.
        previous_action: ``[B, S, c·A]`` float32, the action of the step before.
        previous_reward: ``[B, S, 1]`` float32, the reward of the step before.
        timestep: ``[B, S]`` int32, index of the step within its trajectory.
        trajectory: ``[B, S]`` int32, index of the trajectory within its chain.
        order: ``[B, S]`` int32, index of the step within its chain; −1 is padding.
        loss_mask: ``[B, S]`` float32, 1 where the action enters the loss.
    """

    return_to_go: Any
    observation: Any
    action: Any
    reward: Any
    previous_action: Any
    previous_reward: Any
    timestep: Any
    trajectory: Any
    order: Any
    loss_mask: Any


def stack(rows: Sequence[Batch]) -> Batch:
    """Stack equally long single-chain batches along a new leading B."""
    return Batch(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))


def pad_steps(batch: Batch, multiple: int) -> Batch:
    """Pad S at the end to a multiple, with zeros, `order` −1 and no loss."""
    missing = -batch.order.shape[1] % multiple
    if not missing:
        return batch

    def pad(name: str, array: np.ndarray) -> np.ndarray:
        widths = [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2)
        return np.pad(array, widths, constant_values=PADDING if name == "order" else 0)

    return Batch(**{name: pad(name, array) for name, array in batch._asdict().items()})


def sharding(mesh: Mesh) -> NamedSharding:
    """How every array of a batch lies on the mesh: B over data and fsdp, S over the ring."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "ring"))


def place(batch: Batch, mesh: Mesh) -> Batch:
    """Put a host batch on the mesh, padding S so that it divides evenly over the ring.

    Raises:
        ValueError: the number of chains does not divide over the data and fsdp axes.
    """
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    chains = batch.order.shape[0]
    if chains % shards:
        raise ValueError(
            f"{chains} chains do not divide over mesh.data × mesh.fsdp = {shards}; "
            f"use a multiple, such as {-(-chains // shards) * shards}"
        )
    return jax.device_put(pad_steps(batch, mesh.shape["ring"]), sharding(mesh))
