"""The Agentic Transformer: one pure path from steps to actions for training, prefill, decoding.

A pre-norm GPT over the tokens of `data.packing`. Positions have two levels: a learned embedding
of the timestep within the trajectory, added to every token of a step, and the trajectory's index
in the chain, by which queries and keys are rotated (or which is embedded likewise). Decision
Transformer (arXiv 2106.01345) is the same network over `rsa` tokens of a single trajectory.

On a mesh activations stay where their step lives. Parameters lie in shards; a layer's are gathered
when the layer is reached (over ``tensor`` they stay split: heads and hidden units), and again in
the backward pass (ZeRO, arXiv 1910.02054).
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

import ring
from agent import sharding
from agent.config import ModelConfig
from data.batches import Batch
from data.packing import ACTING_SLOT, SLOTS

_ROTARY_BASES = {"rotary": 1e3, "global": 1e6}
"""The shortest period is 2π indices, the longest nears 2π · base as heads widen."""

_ACTIVATIONS = PartitionSpec(("data", "fsdp"), "ring")

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
        trajectories: largest index of a trajectory in a chain, plus one.
    """

    observation: int
    action: int
    timesteps: int
    trajectories: int


class Tokens(NamedTuple):
    """Embedded tokens with what attention and positions need of them.

    Attributes:
        values: ``[B, T, E]``.
        order: ``[B, T]`` int32, tokens_per_step · step + slot; −1 is padding.
        trajectory: ``[B, T]`` int32.
        chain: ``[B, T]`` int32, index of the sequence within the whole batch.
    """

    values: jax.Array
    order: jax.Array
    trajectory: jax.Array
    chain: jax.Array


State = TypeVar("State")


class Block(nnx.Module):
    """One pre-norm transformer block; attention itself is handed in."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        width, heads = config.width, config.heads
        self.config = config
        dtype = jnp.dtype(config.dtype)
        head = (heads, width // heads)
        self.attention_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.query_key_value = nnx.LinearGeneral(width, (3, *head), dtype=dtype, rngs=rngs)
        self.project = nnx.LinearGeneral(head, width, axis=(-2, -1), dtype=dtype, rngs=rngs)
        self.feedforward_norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.contract = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def attention_inputs(
        self, x: jax.Array, index: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query, key and value ``[B, T, H, D]`` of tokens ``[B, T, E]``, rotated by an index."""
        mixed = self.query_key_value(self.attention_norm(x))
        query, key, value = (mixed[:, :, part] for part in range(3))
        if index is not None:
            base = _ROTARY_BASES[self.config.positions]
            query, key = rotate(query, index, base), rotate(key, index, base)
        return query, key, value

    def finish(
        self, x: jax.Array, attended: jax.Array, tokens: Tokens, key: jax.Array | None
    ) -> jax.Array:
        """Residuals and feed-forward after attention; all ``[B, T, E]`` but attended's heads.

        A ``key`` drops parts of the branches, as in training.
        """
        x = x + self._drop(self.project(attended), tokens, key, branch=0)
        # Blocking the feed-forward is what distinguishes bpt from memory-efficient attention.
        # A sequence of one block, as in decoding, has nothing to gain from being cut.
        block_size = self.config.block_size
        if self.config.memory not in ("bpt", "ring") or x.shape[1] <= block_size:
            forward = self._feedforward(x)
        else:
            forward = ring.blockwise_feedforward(self._feedforward, x, block_size=block_size)
        return x + self._drop(forward, tokens, key, branch=1)

    def _drop(
        self, x: jax.Array, tokens: Tokens, key: jax.Array | None, *, branch: int
    ) -> jax.Array:
        if key is None:
            return x
        rate = self.config.dropout
        own = jax.random.fold_in(key, branch)
        keep = keep_mask(own, tokens.chain, tokens.order, x.shape[-1], rate)
        return jnp.where(keep, x / (1 - rate), 0)

    def _feedforward(self, x: jax.Array) -> jax.Array:
        return self.contract(nnx.relu(self.expand(self.feedforward_norm(x))))


class AgenticTransformer(nnx.Module):
    """Predicts the action of every step of a chain from all that came before it."""

    def __init__(self, config: ModelConfig, dims: Dimensions, *, key: jax.Array) -> None:
        def rngs(name: str) -> nnx.Rngs:
            # By name, so that a switch leaves the beginning of all other parameters as it is.
            return nnx.Rngs(params=jax.random.fold_in(key, zlib.crc32(name.encode())))

        self.config = config
        width = config.width
        sizes = {"return_to_go": 1, "observation": dims.observation, "action": dims.action}
        sizes |= {"reward": 1, "completion": 1}
        self.inputs = nnx.Dict(
            {name: nnx.Linear(sizes[name], width, rngs=rngs(name)) for name in inputs_of(config)}
        )
        small = nnx.initializers.normal(0.02)
        slots = len(SLOTS[config.packing])
        if slots > 1:
            # As large as inputs: layer normalisation would cancel the size of a lone return-to-go.
            large = nnx.initializers.normal(1.0)
            self.slots = nnx.Embed(slots, width, embedding_init=large, rngs=rngs("slots"))
        self.timesteps = nnx.Embed(
            dims.timesteps, width, embedding_init=small, rngs=rngs("timesteps")
        )
        if config.positions == "learned":
            self.trajectories = nnx.Embed(
                dims.trajectories, width, embedding_init=small, rngs=rngs("trajectories")
            )
        # One block whose parameters are stacked over layers: compile time does not grow with depth.
        make = nnx.vmap(lambda keys: Block(config, rngs=keys), in_axes=0, out_axes=0)
        self.blocks = make(rngs("blocks").split(config.layers))
        self.output_norm = nnx.LayerNorm(width, rngs=rngs("output_norm"))
        self.head = nnx.Linear(width, dims.action, rngs=rngs("head"))

    def __call__(self, batch: Batch, dropout_key: jax.Array | None = None) -> jax.Array:
        """Predicted actions ``[B, S, c·A]`` in (−1, 1).

        Args:
            batch: arrays over steps ``[B, S, …]``.
            dropout_key: drops out parts of the residual branches; None drops nothing.
        """
        tokens = self.embed_whole(batch)
        x = self._run_blocks(tokens, dropout_key)
        slots = len(SLOTS[self.config.packing])
        return self.act(x.reshape(x.shape[0], -1, slots, x.shape[-1])[:, :, self.acting_slot])

    def attend(
        self, tokens: Tokens, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> jax.Array:
        """Attention ``[B, T, H, D]`` among whole sequences, as the memory mode computes it."""
        return ring.attention(
            query,
            key,
            value,
            implementation=_IMPLEMENTATION[self.config.memory],
            order=tokens.order,
            segments=None if self.config.cross_episode else tokens.trajectory,
            block_size=self.config.block_size,
        )

    @property
    def acting_slot(self) -> int:
        """The slot of a step whose output predicts the action."""
        return ACTING_SLOT[self.config.packing]

    def embed_whole(self, batch: Batch) -> Tokens:
        """Tokens of all slots of every step, each step's where the step lies."""
        tokens = self.embed(batch, range(len(SLOTS[self.config.packing])))
        return jax.lax.with_sharding_constraint(tokens, _ACTIVATIONS)

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
        chain = jnp.broadcast_to(batch.chain[..., None], order.shape)
        values = values.astype(self.config.dtype)  # only here: returns need all of float32
        return Tokens(*map(interleave, (values, order, trajectory, chain)))

    def _slot(self, slot: int, batch: Batch) -> jax.Array:
        name = SLOTS[self.config.packing][slot]
        if name != "step":
            return self.inputs[name](getattr(batch, name)) + self.slots.embedding[slot]
        seen = {"return_to_go": batch.return_to_go, "observation": batch.observation}
        token = jnp.zeros((), jnp.float32)
        for name, embed in self.inputs.items():
            token += embed(seen[name] if name in seen else getattr(batch, f"previous_{name}"))
        return token

    def _rotation(self, tokens: Tokens) -> jax.Array | None:
        """The index ``[B, T]`` that queries and keys are rotated by."""
        if self.config.positions == "rotary":
            return tokens.trajectory
        if self.config.positions == "global":
            return tokens.order // len(SLOTS[self.config.packing])
        return None

    def _run_blocks(self, tokens: Tokens, dropout_key: jax.Array | None) -> jax.Array:
        """Tokens ``[B, T, E]`` after all blocks, by one scan: compile time is that of one."""
        structure, parameters = nnx.split(self.blocks)
        index = self._rotation(tokens)

        def body(x, layer):
            block = nnx.merge(structure, sharding.gathered(layer[0], dtype=self.config.dtype))
            attended = self.attend(tokens, *block.attention_inputs(x, index))
            drop = None if dropout_key is None else jax.random.fold_in(dropout_key, layer[1])
            return block.finish(x, attended, tokens, drop), None

        # Saving attention's output and log-sum-exp spares the backward pass a second ring.
        policy = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")
        layers = (parameters, jnp.arange(self.config.layers))
        x, _ = jax.lax.scan(jax.checkpoint(body, policy=policy), tokens.values, layers)
        return x

    def run_layers(
        self,
        layers: Sequence[nnx.State],
        tokens: Tokens,
        attend: Callable[..., tuple[jax.Array, State]],
        state: State,
    ) -> tuple[jax.Array, State]:
        """All blocks written out, for caches: slices of one array for all layers would be copies.

        Args:
            layers: parameters of each, whole (see `agent.sharding.gathered`).
            tokens: embedded tokens.
            attend: (query, key, value ``[B, T, H, D]``, state, layer) → (output, state).
            state: a cache.

        Returns:
            Tokens ``[B, T, E]`` after the last block, and the state.
        """
        structure, _ = nnx.split(self.blocks)
        index, x = self._rotation(tokens), tokens.values
        for number, parameters in enumerate(layers):
            block = nnx.merge(structure, parameters)
            attended, state = attend(*block.attention_inputs(x, index), state, number)
            x = block.finish(x, attended, tokens, None)
        return x, state

    def act(self, x: jax.Array) -> jax.Array:
        """Actions ``[B, S, c·A]`` float32 from the acting tokens' outputs ``[B, S, E]``."""
        return jnp.tanh(self.head(self.output_norm(x.astype(jnp.float32))))


def inputs_of(config: ModelConfig) -> tuple[str, ...]:
    """What the tokens of a step are made of: names of fields of `data.batches.Batch`."""
    if config.packing != "step":
        return SLOTS[config.packing]
    optional = {
        "action": config.previous_action,
        "reward": config.reward_token,
        "completion": config.completion,
    }
    return ("return_to_go", "observation", *(name for name, on in optional.items() if on))


def keep_mask(
    key: jax.Array, chain: jax.Array, order: jax.Array, width: int, rate: float
) -> jax.Array:
    """What dropout keeps: a function of key, chain and token order, so the same on every mesh.

    Args:
        key: of one residual branch of one layer in one training step.
        chain: ``[B, T]`` int32, index of the sequence within the whole batch.
        order: ``[B, T]`` int32 token order.
        width: E.
        rate: fraction that is dropped.

    Returns:
        ``[B, T, E]`` bool.
    """

    def token(chain: jax.Array, order: jax.Array) -> jax.Array:
        own = jax.random.fold_in(jax.random.fold_in(key, chain), order)
        return jax.random.bernoulli(own, 1 - rate, (width,))

    return jax.vmap(jax.vmap(token))(chain, order)


def rotate(x: jax.Array, index: jax.Array, base: float) -> jax.Array:
    """Rotary embedding of an index (RoPE, arXiv 2104.09864) on half the channels.

    The other half stays as it is, so that a head can also attend regardless of the index.

    Args:
        x: ``[B, T, H, D]``, D a multiple of 4.
        index: ``[B, T]`` int32, from 0.
        base: the larger, the slower the slowest pair of channels turns.
    """
    pairs = x.shape[-1] // 4
    frequency = base ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    angle = index[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle).astype(x.dtype), jnp.sin(angle).astype(x.dtype)
    first, second, rest = jnp.split(x, [pairs, 2 * pairs], axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos, rest], axis=-1)
