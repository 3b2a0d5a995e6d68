"""The loss: mean squared error of the actions that the batch marks, also by place in an episode."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from data.batches import Batch
from data.packing import steps_in

POSITIONS = ("first_20", "quarter_1", "quarter_2", "quarter_3", "quarter_4")
"""Parts of an episode: its first 20 environment steps, where only a context can tell a hidden
task, then the rest of the first quarter, and the other three."""


class Errors(NamedTuple):
    """Squared errors of a batch, summed, so that parts of it can be added up.

    Attributes:
        total: ``[len(POSITIONS)]`` float32, sums over steps of the mean over action dimensions.
        count: ``[len(POSITIONS)]`` float32, steps.
    """

    total: jax.Array
    count: jax.Array

    @property
    def mean(self) -> jax.Array:
        """Over all steps; nothing marked gives 0, not NaN."""
        return self.total.sum() / self.steps

    @property
    def steps(self) -> jax.Array:
        """How many steps are marked, 1 if none."""
        return jnp.maximum(self.count.sum(), 1)


def edges(timesteps: int, chunk: int) -> np.ndarray:
    """First step of each of `POSITIONS` but the first, in an episode of ``timesteps`` steps."""
    quarters = [-(-timesteps * quarter // 4) for quarter in (1, 2, 3)]
    return np.array([steps_in(20, chunk), *quarters])


def action_errors(predicted: jax.Array, batch: Batch, edges: np.ndarray) -> Errors:
    """Squared errors of the marked actions, float32.

    Args:
        predicted: ``[B, S, c·A]``.
        batch: with ``loss_mask [B, S]``.
        edges: see `edges`.
    """
    error = jnp.square(predicted.astype(jnp.float32) - batch.action).mean(axis=-1)
    error = jnp.where(batch.loss_mask > 0, error, 0)
    place = (batch.timestep[..., None] >= edges).sum(axis=-1)
    marked = jax.nn.one_hot(place, len(edges) + 1) * batch.loss_mask[..., None]
    return Errors((error[..., None] * marked).sum(axis=(0, 1)), marked.sum(axis=(0, 1)))
