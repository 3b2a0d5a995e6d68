"""The Agentic Transformer: one pure path from steps to actions for training, prefill, decoding.

A pre-norm GPT over the tokens of `data.packing`. Positions have two levels: a learned embedding
of the timestep within the trajectory, added to every token of a step, and the trajectory's index
in the chain, by which queries and keys are rotated (or which is embedded likewise). Decision
Transformer (arXiv 2106.01345) is the same network over `rsa` tokens of a single trajectory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

import ring
from agent.config import ModelConfig
from data.batches import Batch
from data.packing import ACTING_SLOT, SLOTS

_ROTARY_BASE = 1000.0
"""The shortest period is 2π trajectories, the longest nears 2π · base as heads widen."""

_IMPLEMENTATION: dict[str, ring.Implementation] = {
    "plain": "dense",
    "memory_efficient": "blockwise",
    "bpt": "blockwise",
    "ring": "ring",
}
"""Attention of each memory mode."""


@dataclass(frozen=True)
class Dimensions:
    """Sizes that the task and the chunk fix.

    Attributes:
        observation: O.
        action: c·A, all actions of one step.
        timesteps: most steps in a trajectory.
        trajectories: most trajectories in a chain.
    """

    observation: int
    action: int
    timesteps: int
    trajectories: int


class Tokens(NamedTuple):
    """Embedded tokens with what attention and positions need of them.

    Attributes:
        values: ``[B, T, E]``.
        trajectory: ``[B, T]`` int32.
        order: ``[B, T]`` int32, tokens_per_step · step + slot; −1 is padding.
    """

    values: jax.Array
    trajectory: jax.Array
    order: jax.Array


Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, jax.Array], tuple[jax.Array, Any, Any]]
"""(query, key, value ``[B, T, H, D]``, carried state, layer) → (output, state, kept per layer)."""


class Block(nnx.Module):
    """One pre-norm transformer block; attention itself is handed in."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        width = config.width
        self.heads = config.heads
        self.rotary = config.positions == "rotary"
        self.dropout = config.dropout
        # Blocking the feed-forward is what distinguishes bpt from memory-efficient attention.
        self.block_size = config.block_size if config.memory in ("bpt", "ring") else None
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.query_key_value = nnx.Linear(width, 3 * width, rngs=rngs)
        self.project = nnx.Linear(width, width, rngs=rngs)
        self.feedforward_norm = nnx.LayerNorm(width, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, rngs=rngs)
        self.contract = nnx.Linear(4 * width, width, rngs=rngs)

    def attention_inputs(
        self, x: jax.Array, trajectory: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value ``[B, T, H, D]`` of tokens ``[B, T, E]``, rotated."""
        batch, length, width = x.shape
        mixed = self.query_key_value(self.attention_norm(x))
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.reshape(shape) for part in jnp.split(mixed, 3, axis=-1))
        if self.rotary:
            query, key = rotate(query, trajectory), rotate(key, trajectory)
        return query, key, value

    def finish(
        self, x: jax.Array, attended: jax.Array, order: jax.Array, key: jax.Array | None
    ) -> jax.Array:
        """Residuals and feed-forward after attention; all ``[B, T, E]`` but attended's heads.

        A ``key`` drops parts of the branches, as in training.
        """
        x = x + self._drop(self.project(attended.reshape(x.shape)), order, key, branch=0)
        # A sequence of one block, as in decoding, has nothing to gain from being cut.
        if self.block_size is None or x.shape[1] <= self.block_size:
            forward = self._feedforward(x)
        else:
            forward = ring.blockwise_feedforward(self._feedforward, x, block_size=self.block_size)
        return x + self._drop(forward, order, key, branch=1)

    def _drop(
        self, x: jax.Array, order: jax.Array, key: jax.Array | None, *, branch: int
    ) -> jax.Array:
        if key is None:
            return x
        keep = keep_mask(jax.random.fold_in(key, branch), order, x.shape[-1], self.dropout)
        return jnp.where(keep, x / (1 - self.dropout), 0)

    def _feedforward(self, x: jax.Array) -> jax.Array:
        return self.contract(nnx.relu(self.expand(self.feedforward_norm(x))))


class AgenticTransformer(nnx.Module):
    """Predicts the action of every step of a chain from all that came before it."""

    def __init__(self, config: ModelConfig, dims: Dimensions, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width = config.width
        inputs = {"return_to_go": 1, "observation": dims.observation, "reward": 1}
        if config.packing != "step" or config.previous_action:
            inputs["action"] = dims.action
        if config.packing == "rsa":
            del inputs["reward"]
        self.inputs = nnx.Dict(
            {name: nnx.Linear(size, width, rngs=rngs) for name, size in inputs.items()}
        )
        small = nnx.initializers.normal(0.02)
        slots = len(SLOTS[config.packing])
        if slots > 1:
            # As large as inputs: layer normalisation would cancel the size of a lone return-to-go.
            large = nnx.initializers.normal(1.0)
            self.slots = nnx.Embed(slots, width, embedding_init=large, rngs=rngs)
        self.timesteps = nnx.Embed(dims.timesteps, width, embedding_init=small, rngs=rngs)
        if config.positions == "learned":
            self.trajectories = nnx.Embed(dims.trajectories, width, embedding_init=small, rngs=rngs)
        # One block whose parameters are stacked over layers: compile time does not grow with depth.
        make = nnx.vmap(lambda keys: Block(config, rngs=keys), in_axes=0, out_axes=0)
        self.blocks = make(rngs.split(config.layers))
        self.output_norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, dims.action, rngs=rngs)

    def __call__(self, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Predicted actions ``[B, S, c·A]`` in (−1, 1); a key drops out, as in training."""
        return self.forward(batch, dropout_key)[0]

    def forward(
        self, batch: Batch, dropout_key: jax.Array | None = None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array], jax.Array]:
        """Actions and the keys and values that later tokens may attend to.

        Args:
            batch: arrays over steps ``[B, S, …]``.
            dropout_key: drops out parts of the residual branches; None drops nothing.

        Returns:
            Actions ``[B, S, c·A]``; keys and values ``[L, B, T, H, D]`` (computed only if used);
            token order ``[B, T]``.
        """
        slots = len(SLOTS[self.config.packing])
        on_mesh = PartitionSpec(("data", "fsdp"), "ring")
        tokens = jax.lax.with_sharding_constraint(self.embed(batch, range(slots)), on_mesh)

        def attend(query, key, value, state, layer):
            out = ring.attention(
                query,
                key,
                value,
                implementation=_IMPLEMENTATION[self.config.memory],
                order=tokens.order,
                block_size=self.config.block_size,
            )
            return out, state, (key, value)

        # Saving attention's output and log-sum-exp spares the backward pass a second ring.
        policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
        x, _, kept = self.run_blocks(tokens, attend, None, remat=policy, dropout_key=dropout_key)
        acting = x.reshape(x.shape[0], -1, slots, x.shape[-1])[:, :, self.acting_slot]
        return self.act(acting), kept, tokens.order

    @property
    def acting_slot(self) -> int:
        """The slot of a step whose output predicts the action."""
        return ACTING_SLOT[self.config.packing]

    def embed(self, batch: Batch, slots: Sequence[int]) -> Tokens:
        """Tokens of the given slots of every step, in causal order.

        Args:
            batch: arrays over steps ``[B, S, …]``.
            slots: ascending indices into `SLOTS` of the packing.

        Returns:
            Tokens with T = S · len(slots).
        """
        names = SLOTS[self.config.packing]
        time = self.timesteps(batch.timestep)
        if self.config.positions == "learned":
            time += self.trajectories(batch.trajectory)
        values = jnp.stack([self._slot(slot, batch) + time for slot in slots], axis=2)
        order = batch.order[..., None] * len(names) + jnp.array(list(slots), jnp.int32)
        order = jnp.where(batch.order[..., None] < 0, -1, order)

        def interleave(array: jax.Array) -> jax.Array:
            rows, steps, count = array.shape[:3]
            return array.reshape(rows, steps * count, *array.shape[3:])

        trajectory = jnp.broadcast_to(batch.trajectory[..., None], order.shape)
        return Tokens(interleave(values), interleave(trajectory), interleave(order))

    def _slot(self, slot: int, batch: Batch) -> jax.Array:
        name = SLOTS[self.config.packing][slot]
        if name != "step":
            return self.inputs[name](getattr(batch, name)) + self.slots.embedding[slot]
        token = self.inputs["return_to_go"](batch.return_to_go)
        token += self.inputs["observation"](batch.observation)
        token += self.inputs["reward"](batch.previous_reward)
        if self.config.previous_action:
            token += self.inputs["action"](batch.previous_action)
        return token

    def run_blocks(
        self,
        tokens: Tokens,
        attend: Attend,
        state: Any,
        *,
        remat: Any = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, Any]:
        """All blocks over the tokens by one scan.

        Args:
            tokens: embedded tokens.
            attend: attention, given the carried state (a cache when decoding).
            state: what ``attend`` carries from layer to layer.
            remat: a checkpoint policy, when gradients are wanted.
            dropout_key: see `forward`.

        Returns:
            Tokens ``[B, T, E]`` after the last block, the state, what ``attend`` kept per layer.
        """
        structure, parameters = nnx.split(self.blocks)

        def body(carry, layer):
            x, state = carry
            block = nnx.merge(structure, layer[0])
            query, key, value = block.attention_inputs(x, tokens.trajectory)
            attended, state, kept = attend(query, key, value, state, layer[1])
            drop = None if dropout_key is None else jax.random.fold_in(dropout_key, layer[1])
            return (block.finish(x, attended, tokens.order, drop), state), kept

        if remat is not None:
            body = jax.checkpoint(body, policy=remat)
        layers = (parameters, jnp.arange(self.config.layers))
        (x, state), kept = jax.lax.scan(body, (tokens.values, state), layers)
        return x, state, kept

    def act(self, x: jax.Array) -> jax.Array:
        """Actions ``[B, S, c·A]`` from the acting tokens' outputs ``[B, S, E]``."""
        return jnp.tanh(self.head(self.output_norm(x)))


def keep_mask(key: jax.Array, order: jax.Array, width: int, rate: float) -> jax.Array:
    """What dropout keeps: a function of key, chain and token order, so the same on every mesh.

    Args:
        key: of one residual branch of one layer in one training step.
        order: ``[B, T]`` int32 token order.
        width: E.
        rate: fraction that is dropped.

    Returns:
        ``[B, T, E]`` bool.
    """

    def token(chain: jax.Array, order: jax.Array) -> jax.Array:
        own = jax.random.fold_in(jax.random.fold_in(key, chain), order)
        return jax.random.bernoulli(own, 1 - rate, (width,))

    chains = jnp.arange(order.shape[0])
    return jax.vmap(jax.vmap(token, in_axes=(None, 0)))(chains, order)


def rotate(x: jax.Array, trajectory: jax.Array) -> jax.Array:
    """Rotary embedding of the trajectory index (RoPE, arXiv 2104.09864) on half the channels.

    The other half stays as it is, so that a head can also attend regardless of the index.

    Args:
        x: ``[B, T, H, D]``, D a multiple of 4.
        trajectory: ``[B, T]`` int32, 0…N−1.
    """
    pairs = x.shape[-1] // 4
    frequency = _ROTARY_BASE ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    angle = trajectory[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second, rest = jnp.split(x, [pairs, 2 * pairs], axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos, rest], axis=-1)
