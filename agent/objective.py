"""The loss: mean squared error of the actions that the batch marks."""

import jax
import jax.numpy as jnp

from data.batches import Batch


def action_error(predicted: jax.Array, batch: Batch) -> jax.Array:
    """Mean over the masked-in steps and all action dimensions of the squared error, float32.

    Args:
        predicted: ``[B, S, c·A]``.
        batch: with ``loss_mask [B, S]``; nothing masked in gives 0, not NaN.
    """
    error = jnp.square(predicted.astype(jnp.float32) - batch.action).mean(axis=-1)
    return (error * batch.loss_mask).sum() / jnp.maximum(batch.loss_mask.sum(), 1)
