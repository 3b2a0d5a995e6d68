"""Policies: an agent that remembers what it has seen, one step at a time."""

from collections import deque
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

import ring
from agent import cache as caches
from agent import networks, sharding
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


class Weights(NamedTuple):
    """Parameters as decoding reads them: whole on every device but for ``tensor``.

    Attributes:
        outer: of the network; those of the blocks are not read.
        layers: of each block.
    """

    outer: nnx.State
    layers: tuple[nnx.State, ...]


class ChainPolicy:
    """A transformer with one cache: across all episodes of a chain, or of the current one only.

    Decision Transformer on whole episodes (dt_long) forgets everything between them.

    Args:
        agent: a trained transformer.
        batch: B, environments in lock step.
        steps: the most steps of the own episodes that are known at a time.
        dtype: of cached keys and values; by default what the network computes in.
    """

    def __init__(self, agent: Agent, *, batch: int, steps: int, dtype: str | None = None) -> None:
        config = agent.config.model
        shards = agent.mesh.shape["data"] * agent.mesh.shape["fsdp"]
        if batch % shards:
            raise ValueError(
                f"{batch} rollouts do not divide over mesh.data × mesh.fsdp = {shards}; "
                f"use {-(-batch // shards) * shards}"
            )
        self._agent, self._batch, self._capacity = agent, batch, steps
        self._dtype = dtype or config.dtype
        self._slots = len(SLOTS[config.packing])
        self._forgets = agent.config.method == "dt_long"
        # `step` tokens carry the reward of the step before: nothing is left to record.
        self._acting = 1 if config.packing == "step" else 2
        self._prefix: tuple[Cache, ...] = ()
        self._context: Batch | None = None  # that the prefix holds whole
        self._first = self._written = self._known_from = 0
        with jax.set_mesh(agent.mesh):
            self._weights = _weights(agent.parameters, config.layers, config.dtype)
            self._cache = caches.empty(
                agent.mesh,
                layers=config.layers,
                batch=batch,
                rows=caches.capacity(steps, self._slots, agent.mesh.shape["ring"]),
                heads=config.heads,
                head_dim=config.width // config.heads,
                dtype=self._dtype,
                segmented=not config.cross_episode,
            )

    def remember(self, context: Batch | None) -> None:
        """Know these chains and nothing else, as exactly as training does.

        A context that is known already, and whole, is not computed again.

        Args:
            context: packed chains ``[B, S, …]``, or one ``[1, S, …]`` that all environments share;
                padding only at the end. None: nothing.
        """
        again = self._context is not None and _same(self._context, context)
        if not again:
            self._prefix, self._first, self._context = (), 0, context
        emptied = caches.forget(self._cache.order, np.iinfo(np.int32).max)
        self._cache = self._cache._replace(order=emptied)
        self._written = self._known_from = 0
        if context is None or again:
            return
        self._first = int((context.order >= 0).sum(axis=1).max())
        rows = context.order.shape[0]
        shared = rows == 1 and self._batch > 1
        if shared:  # every data shard computes it
            shards = self._agent.mesh.shape["data"] * self._agent.mesh.shape["fsdp"]
            context = take(context, np.zeros(shards, int), np.arange(context.order.shape[1]))
        elif rows != self._batch:
            raise ValueError(f"a context of {rows} chains for {self._batch} environments")
        apart = not self._agent.config.model.cross_episode
        laid_out = place(context, self._agent.mesh, "contiguous" if apart else "zigzag")
        with jax.set_mesh(self._agent.mesh):
            prefill = _prefiller(self._agent.mesh)
            structure = self._agent.structure
            self._prefix = (prefill(structure, self._dtype, shared, self._weights, laid_out),)

    def forget(self, before: int) -> None:
        """Leave out all steps before this one, counted from the beginning of the context.

        What later tokens took from them stays: their keys and values are not computed again.
        """
        self._known_from, self._context = max(0, before - self._first), None
        with jax.set_mesh(self._agent.mesh):
            *prefix, own = (
                each._replace(order=caches.forget(each.order, np.int32(before * self._slots)))
                for each in (*self._prefix, self._cache)
            )
        self._prefix, self._cache = tuple(prefix), own

    def act(self, step: Batch) -> np.ndarray:
        """See `Policy.act`.

        Raises:
            ValueError: more steps are to be known than the cache has room for.
        """
        if self._forgets and step.timestep[0, 0] == 0:
            self.remember(None)
        if self._written - self._known_from >= self._capacity:
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
            new, action = _decoder(self._agent.mesh)(
                self._agent.structure, slots, self._weights, self._cache, self._prefix, step
            )
            written = np.int32(self._written)
            self._cache = caches.append(self._cache, new, slots[0], self._slots, written)
        return action


def _same(ours: Batch, theirs: Batch | None) -> bool:
    return theirs is not None and all(map(np.array_equal, ours, theirs))


@cache
def _decoder(mesh: Mesh) -> Any:
    """`_decode` compiled for a mesh."""
    return jax.jit(_decode, static_argnums=(0, 1), compiler_options=sharding.compiler_options(mesh))


def _decode(
    structure: nnx.GraphDef,
    slots: tuple[int, ...],
    weights: Weights,
    own: Cache,
    prefix: tuple[Cache, ...],
    step: Batch,
) -> tuple[Cache, jax.Array]:
    """Keys and values of some slots of one step, and actions ``[B, c·A]`` if these include acting.

    Orders and segments are those of the first environment: all are in lock step.
    """
    model: Any = nnx.merge(structure, weights.outer)
    tokens = model.embed(step, slots)
    order = tokens.order[0]
    segments = None if model.config.cross_episode else tokens.trajectory[0]

    def attend(query, key, value, new, layer):
        new = new.extended(key, value, own.key[0].dtype)
        cached, fresh = [each.layer(layer) for each in (*prefix, own)], new.layer(layer)
        out = ring.decode_attention(query, order, cached, new=fresh, q_segments=segments)
        return out, new

    x, new = model.run_layers(weights.layers, tokens, attend, Cache((), (), order, segments))
    acting = model.acting_slot if model.acting_slot in slots else slots[-1]
    action = model.act(x[:, slots.index(acting)])
    return new, jax.lax.with_sharding_constraint(action, PartitionSpec())


@partial(jax.jit, static_argnums=(1, 2))
def _weights(parameters: nnx.State, layers: int, dtype: str) -> Weights:
    stacked: Any = parameters[sharding.STACKED]
    each = (jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(layers))
    return Weights(
        outer=sharding.gathered(parameters, but=sharding.STACKED),
        layers=tuple(sharding.gathered(layer, dtype=dtype) for layer in each),
    )


@cache
def _prefiller(mesh: Mesh) -> Any:
    """`_prefill` compiled for a mesh."""
    options = sharding.compiler_options(mesh)
    return jax.jit(_prefill, static_argnums=(0, 1, 2), compiler_options=options)


def _prefill(
    structure: nnx.GraphDef, dtype: str, shared: bool, weights: Weights, context: Batch
) -> Cache:
    """Keys and values of a context on the devices that compute them, by the training's attention.

    Where it is ``shared``, all rows of the batch are one chain, of which one is kept.
    """
    model: Any = nnx.merge(structure, weights.outer)
    tokens = model.embed_whole(context)
    rows = slice(0, 1) if shared else slice(None)

    def attend(query, key, value, kept, layer):
        kept = kept.extended(key[rows], value[rows], dtype)
        return model.attend(tokens, query, key, value), kept

    segments = None if model.config.cross_episode else tokens.trajectory[rows]
    kept = Cache((), (), tokens.order[rows], segments)
    _, kept = model.run_layers(weights.layers, tokens, attend, kept)
    return caches.placed(kept)


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
    actions = networks.assemble(structure, parameters)(jax.tree.map(jnp.asarray, batch))
    return jax.lax.with_sharding_constraint(actions, PartitionSpec())


def make(agent: Agent, *, batch: int, steps: int, dtype: str | None = None) -> Policy:
    """The policy that fits an agent's method; see `ChainPolicy` for the arguments."""
    if agent.config.method in ("at", "dt_long"):
        return ChainPolicy(agent, batch=batch, steps=steps, dtype=dtype)
    return WindowPolicy(agent)
