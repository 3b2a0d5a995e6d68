"""Policies: an agent that remembers what it has seen, one step at a time."""

from collections import deque
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import ring
from agent import cache as caches
from agent import networks
from agent.cache import Cache
from agent.checkpoint import Agent
from data.batches import Batch, place, take
from data.packing import SLOTS


class Policy(Protocol):
    """Acts in B environments in lock step; a step of the sequence is ``chunk`` of theirs."""

    def act(self, step: Batch) -> np.ndarray:
        """Actions ``[B, c·A]`` for a batch of one step (S = 1) whose action is yet unknown."""
        ...

    def record(self, step: Batch) -> None:
        """Take note of the same step once its action and reward are known."""
        ...


class ChainPolicy:
    """A transformer with one cache: across all episodes of a chain, or of the current one only.

    Args:
        agent: a trained Agentic Transformer.
        batch: B, environments in lock step.
        steps: the most steps that will be appended.
        context: packed chains ``[B, S, …]`` that precede the agent's own episodes (None: none).

    Decision Transformer on whole episodes (dt_long) forgets everything between them.
    """

    def __init__(self, agent: Agent, *, batch: int, steps: int, context: Batch | None) -> None:
        config = agent.config.model
        shards = agent.mesh.shape["data"] * agent.mesh.shape["fsdp"]
        if batch % shards:
            raise ValueError(
                f"{batch} rollouts do not divide over mesh.data × mesh.fsdp = {shards}; "
                f"use {-(-batch // shards) * shards}"
            )
        self._agent = agent
        self._slots = len(SLOTS[config.packing])
        self._forgets = agent.config.method == "dt_long"
        episode = None if config.cross_episode else networks.dimensions(agent.config).timesteps
        # `step` tokens carry the reward of the step before: nothing is left to record.
        self._acting = 1 if config.packing == "step" else 2
        self._first = 0 if context is None else context.order.shape[1]
        self._written = 0
        self._capacity = steps
        with jax.set_mesh(agent.mesh):
            self._prefix = () if context is None else (_prefill(agent, context),)
            self._cache = caches.empty(
                agent.mesh,
                layers=config.layers,
                batch=batch,
                steps=steps,
                tokens_per_step=self._slots,
                heads=config.heads,
                head_dim=config.width // config.heads,
                dtype=config.dtype,
                first_step=self._first,
                episode=episode,
            )

    def act(self, step: Batch) -> np.ndarray:
        """See `Policy.act`.

        Raises:
            ValueError: more steps than the cache has room for.
        """
        if self._forgets and step.timestep[0, 0] == 0:
            self._written = 0  # rows of later orders are not seen, and written again in time
        if self._written >= self._capacity:
            raise ValueError(f"the cache has room for {self._capacity} steps, and all are taken")
        return np.asarray(self._append(step, tuple(range(self._acting))))

    def record(self, step: Batch) -> None:
        """See `Policy.record`."""
        if self._acting < self._slots:
            self._append(step, tuple(range(self._acting, self._slots)))
        self._written += 1

    def _append(self, step: Batch, slots: tuple[int, ...]) -> jax.Array:
        step = step._replace(order=np.full_like(step.order, self._first + self._written))
        if self._forgets:
            step = step._replace(trajectory=np.zeros_like(step.trajectory))
        with jax.set_mesh(self._agent.mesh):
            self._cache, action = _decode(
                self._agent.structure,
                slots,
                self._agent.parameters,
                self._cache,
                self._prefix,
                step,
                np.int32(self._written),
            )
        return action


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _decode(
    structure: nnx.GraphDef,
    slots: tuple[int, ...],
    parameters: nnx.State,
    cache: Cache,
    prefix: tuple[Cache, ...],
    step: Batch,
    written: jax.Array,
) -> tuple[Cache, jax.Array]:
    """Append some slots of one step to the cache; actions ``[B, c·A]`` if they include acting."""
    model: Any = networks.assemble(structure, parameters)
    tokens = model.embed(step, slots)
    put = partial(
        caches.write,
        step=written,
        first_slot=slots[0],
        tokens_per_step=len(SLOTS[model.config.packing]),
    )

    def attend(query, key, value, cache, layer):
        cache = cache._replace(
            key=put(cache.key, key, layer=layer), value=put(cache.value, value, layer=layer)
        )
        parts = [each.layer(layer) for each in (*prefix, cache)]
        segments = None if model.config.cross_episode else tokens.trajectory
        return ring.decode_attention(query, tokens.order, parts, q_segments=segments), cache, None

    x, cache, _ = model.run_blocks(tokens, attend, cache)
    acting = model.acting_slot if model.acting_slot in slots else slots[-1]
    return cache, model.act(x[:, slots.index(acting)])


def _prefill(agent: Agent, context: Batch) -> Cache:
    """Keys and values of a context, left on the mesh where the training path computes them."""
    apart = not agent.config.model.cross_episode
    laid_out = place(context, agent.mesh, "contiguous" if apart else "zigzag")
    (key, value), tokens = _forward_kept(agent.structure, agent.parameters, laid_out)
    return Cache(key, value, tokens.order, tokens.trajectory if apart else None)


@partial(jax.jit, static_argnums=0)
def _forward_kept(structure: nnx.GraphDef, parameters: nnx.State, context: Batch) -> Any:
    model: Any = networks.assemble(structure, parameters)
    _, kept, tokens = model.forward(context)
    return kept, tokens._replace(values=None)


class WindowPolicy:
    """A baseline that sees the last K steps of the current episode and nothing before.

    Args:
        agent: a trained Decision Transformer (K = data.window) or behaviour-cloning network.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        transformer = agent.config.method == "dt"
        self._size = agent.config.data.window if transformer else 1
        self._steps: deque[Batch] = deque(maxlen=self._size)

    def act(self, step: Batch) -> np.ndarray:
        """See `Policy.act`; a step with timestep 0 begins a new episode."""
        if step.timestep[0, 0] == 0:
            self._steps.clear()
        window = [*self._steps, step][-self._size :]
        joined = Batch(*(np.concatenate(arrays, axis=1) for arrays in zip(*window, strict=True)))
        order = np.broadcast_to(np.arange(len(window), dtype=np.int32), joined.order.shape)
        rows = np.arange(len(order))
        alone = joined._replace(order=order, trajectory=np.zeros_like(joined.trajectory))
        padded = take(alone, rows, np.arange(self._size))
        with jax.set_mesh(self._agent.mesh):
            actions = _predict(self._agent.structure, self._agent.parameters, padded)
        return np.asarray(actions)[:, len(window) - 1]

    def record(self, step: Batch) -> None:
        """See `Policy.record`."""
        self._steps.append(step)


@partial(jax.jit, static_argnums=0)
def _predict(structure: nnx.GraphDef, parameters: nnx.State, batch: Batch) -> jax.Array:
    return networks.assemble(structure, parameters)(jax.tree.map(jnp.asarray, batch))


def make(agent: Agent, *, batch: int, steps: int, context: Batch | None = None) -> Policy:
    """The policy that fits an agent's method; only the Agentic Transformer takes a context."""
    if agent.config.method in ("at", "dt_long"):
        return ChainPolicy(agent, batch=batch, steps=steps, context=context)
    return WindowPolicy(agent)
