"""Behaviour cloning; Decision Transformer is `agent.model` over `rsa` windows of one episode."""

from itertools import pairwise

import jax
import jax.numpy as jnp
from flax import nnx

from agent.config import ModelConfig
from agent.model import Dimensions
from data.batches import Batch


class BehaviourCloning(nnx.Module):
    """A ReLU network from the observation of a step to its actions."""

    def __init__(self, config: ModelConfig, dims: Dimensions, *, key: jax.Array) -> None:
        rngs = nnx.Rngs(params=key)
        sizes = [dims.observation] + [config.width] * config.layers
        self.hidden = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(sizes)])
        self.head = nnx.Linear(sizes[-1], dims.action, rngs=rngs)

    def __call__(self, batch: Batch) -> jax.Array:
        """Predicted actions ``[B, S, c·A]`` in (−1, 1)."""
        x = batch.observation
        for layer in self.hidden:
            x = nnx.relu(layer(x))
        return jnp.tanh(self.head(x))
