"""Batches as pure functions of (seed, step): nothing to save, nothing to restore."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from jax.sharding import Mesh

from data.batches import PADDING, Batch, Layout, place_parts, stack
from data.hindsight import Chain, ContextOrder, Relabel, chain
from data.normalize import Normalizer
from data.packing import SLOTS, LossOn, pack, steps_in, token_reward
from data.pool import Pool


class Sampler(Protocol):
    """Draws the batch of every training step; any part of it can be built without the rest."""

    @property
    def layout(self) -> Layout:
        """How steps lie along the ring."""
        ...

    def trajectories_at(self, seed: int, step: int) -> int:
        """n, the trajectories in every sequence of this step's batch."""
        ...

    def shape(self, seed: int, step: int) -> tuple[int, int]:
        """B and S of this step's batch."""
        ...

    def part(self, seed: int, step: int, rows: np.ndarray, steps: np.ndarray) -> Batch:
        """Rows × steps of the batch; steps beyond S are padding."""
        ...

    def names(self, seed: int, step: int) -> Iterator[str]:
        """What each row is made of, for messages."""
        ...


def whole(sampler: Sampler, seed: int, step: int) -> Batch:
    """The batch of one training step on the host, in the order of its steps."""
    rows, steps = sampler.shape(seed, step)
    return sampler.part(seed, step, np.arange(rows), np.arange(steps))


def placed(sampler: Sampler, mesh: Mesh, seed: int, step: int) -> Batch:
    """The batch of one training step on the mesh, each process building its own part."""

    def part(rows: np.ndarray, steps: np.ndarray) -> Batch:
        return sampler.part(seed, step, rows, steps)

    return place_parts(part, *sampler.shape(seed, step), mesh, sampler.layout)


def trajectory_counts(largest: int) -> list[int]:
    """What n is drawn from: 1…N up to eight, then only powers of two (few compiled shapes)."""
    powers = [2**k for k in range(4, 31) if 2**k < largest]
    return sorted({*range(1, min(largest, 8) + 1), *powers, largest})


def sequences(tokens: int, batch_tokens: int, multiple: int) -> int:
    """Sequences of ``tokens`` in a batch of about ``batch_tokens``: a multiple, and not none."""
    return multiple * max(1, batch_tokens // (tokens * multiple))


class Draw(NamedTuple):
    """Which trajectories make a chain.

    Attributes:
        task: whose rewards count.
        episodes: int ``[n]``, episodes of the store, in no order.
    """

    task: str
    episodes: np.ndarray


@dataclass(frozen=True)
class ChainSampler:
    """Draws chains of hindsight for the Agentic Transformer.

    The last trajectory comes from the best ``top`` of the pool under the chain's task and the
    context uniformly, then all are sorted (In-Context Decision Transformer's sampler; ``top=1``
    is the Agentic Transformer paper's). With several tasks each chain is relabelled with one of
    them, untold. Rewards and returns-to-go are scaled by the task's attainable return, so that
    a target of about 1 means the best for every task and the scale tells little of which it is.
    Not nothing: a chain's target is its own best return, and how far that is from 1 may differ
    between the tasks.

    Attributes:
        pool: episodes and rewards.
        normalizer: applied to observations.
        packing: tokens a step, see `data.packing.SLOTS`.
        chunk: environment steps in one step.
        trajectories: N, the most trajectories in a chain.
        batch_tokens: tokens in a batch, about; the number of chains follows from it and n.
        fixed: always N trajectories, instead of n drawn from `trajectory_counts` for each batch.
        top: fraction of the pool that the last trajectory is drawn from.
        relabel: target returns, see `data.hindsight.chain`.
        context: order of the context, see `data.hindsight.chain`.
        loss_on: whose actions enter the loss.
        cross_episode: trajectories may know of each other.
        index_range: trajectory indices are a sorted random subset of 0…index_range−1; None counts
            them from 0.
        multiple: the number of chains is a multiple of it (devices, times parts of a batch).
        held_out: draw from the pool's held-out episodes, instead of those for training.
    """

    pool: Pool
    normalizer: Normalizer
    packing: str
    chunk: int
    trajectories: int
    batch_tokens: int
    fixed: bool = False
    top: float = 1.0
    relabel: Relabel = "best"
    context: ContextOrder = "ascending"
    loss_on: LossOn = "last"
    cross_episode: bool = True
    index_range: int | None = None
    multiple: int = 1
    held_out: bool = False

    def __post_init__(self) -> None:
        """Refuse chains of more trajectories than there are episodes, and steps longer than one.

        Raises:
            ValueError: as said.
        """
        episodes = self.pool.part(self.held_out)
        if self.trajectories > len(episodes):
            part = "held-out" if self.held_out else "training"
            raise ValueError(
                f"a chain of {self.trajectories} trajectories needs as many {part} episodes, "
                f"{self.pool.store.path} has {len(episodes)}; lower data.trajectories or collect "
                f"more"
            )
        shortest = int(np.diff(self.pool.store.offsets).min()) - 1
        if self.chunk > shortest:
            # Only whole steps enter the loss: there would be nothing to learn.
            raise ValueError(
                f"a step of {self.chunk} environment steps does not fit an episode of {shortest} "
                f"in {self.pool.store.path}; lower model.chunk"
            )

    @property
    def layout(self) -> Layout:
        """See `Sampler.layout`."""
        return "zigzag" if self.cross_episode else "contiguous"

    @cached_property
    def _best(self) -> dict[str, np.ndarray]:
        return {task: self.pool.best(task, self.top, self.held_out) for task in self.pool.tasks}

    @cached_property
    def steps(self) -> int:
        """Steps of the longest trajectory."""
        return steps_in(int(np.diff(self.pool.store.offsets).max()) - 1, self.chunk)

    def trajectories_at(self, seed: int, step: int) -> int:
        """See `Sampler.trajectories_at`."""
        if self.fixed:
            return self.trajectories
        return int(generator(seed, step).choice(trajectory_counts(self.trajectories)))

    def chains(self, count: int) -> int:
        """Chains in a batch whose chains have ``count`` trajectories."""
        tokens = count * self.steps * len(SLOTS[self.packing])
        return sequences(tokens, self.batch_tokens, self.multiple)

    def shape(self, seed: int, step: int) -> tuple[int, int]:
        """See `Sampler.shape`."""
        count = self.trajectories_at(seed, step)
        return self.chains(count), count * self.steps

    def draw(self, seed: int, step: int, row: int, count: int) -> Draw:
        """What the chain in one row of this step's batch is made of, of ``count`` trajectories."""
        pool, episodes = self.pool, self.pool.part(self.held_out)
        rng = generator(seed, step, row)
        task = pool.tasks[rng.integers(len(pool.tasks))]
        last = rng.choice(self._best[task])
        others = rng.choice(episodes[episodes != last], count - 1, replace=False)
        return Draw(task, np.append(others, last))

    def chain(self, seed: int, step: int, row: int, count: int) -> Chain:
        """The chain in one row of this step's batch."""
        draw = self.draw(seed, step, row, count)
        return chain(
            [self.pool.trajectory(episode, draw.task) for episode in draw.episodes],
            scale=self.pool.best_return(draw.task),
            relabel=self.relabel,
            context=self.context,
            rng=generator(seed, step, row, _SHUFFLE),
        )

    def indices(self, seed: int, step: int, row: int, count: int) -> np.ndarray:
        """What the network is told of each trajectory's place in that chain, int ``[n]``."""
        if self.index_range is None:
            return np.arange(count)
        return gapped(self.index_range, seed, step, row, count)

    def part(self, seed: int, step: int, rows: np.ndarray, steps: np.ndarray) -> Batch:
        """See `Sampler.part`."""
        count = self.trajectories_at(seed, step)
        batch = stack(
            [
                pack(
                    self.chain(seed, step, row, count),
                    chunk=self.chunk,
                    loss_on=self.loss_on,
                    cross_episode=self.cross_episode,
                    indices=self.indices(seed, step, row, count),
                    row=row,
                    steps=steps,
                )
                for row in map(int, rows)
            ]
        )
        observation = self.normalizer(batch.observation)
        observation[batch.order == PADDING] = 0
        return batch._replace(observation=observation)

    def names(self, seed: int, step: int) -> Iterator[str]:
        """See `Sampler.names`."""
        count = self.trajectories_at(seed, step)
        for row in range(self.chains(count)):
            draw = self.draw(seed, step, row, count)
            episodes = ", ".join(map(str, draw.episodes))
            yield f"chain {row}: {draw.task}, episodes {episodes}"


_GAPS, _SHUFFLE = 1, 2
"""Streams of their own, so that a switch changes nothing but what it is about."""


@dataclass(frozen=True)
class WindowSampler:
    """Draws windows of single episodes for the baselines: K steps with the episode's own return.

    Decision Transformer has K = 20; behaviour cloning has K = 1 and ignores all but observation
    and action. The windows are gathered straight from the memory-mapped fields.

    Attributes:
        pool: episodes and rewards, of one task.
        normalizer: applied to observations.
        chunk: environment steps in one step.
        window: K, steps in a window.
        top: fraction of the pool, best first, that episodes are drawn from.
        windows: windows in a batch.
        held_out: draw from the pool's held-out episodes, instead of those for training.
    """

    pool: Pool
    normalizer: Normalizer
    chunk: int
    window: int
    top: float
    windows: int
    held_out: bool = False

    def __post_init__(self) -> None:
        """Refuse several tasks and episodes shorter than a window.

        Raises:
            ValueError: as said.
        """
        if len(self.pool.tasks) != 1:
            raise ValueError(f"a baseline is trained on one task, got {self.pool.tasks}")
        shortest = int(np.diff(self.pool.store.offsets).min()) - 1
        if shortest < self.window * self.chunk:
            raise ValueError(
                f"a window of {self.window} × {self.chunk} environment steps does not fit an "
                f"episode of {shortest} in {self.pool.store.path}; lower data.window"
            )

    @cached_property
    def _earned(self) -> np.ndarray:
        """Running sum of the task's rewards over all rows of the store, float64."""
        return np.cumsum(self.pool.rewards[self.pool.tasks[0]], dtype=np.float64)

    @cached_property
    def _episodes(self) -> np.ndarray:
        return self.pool.best(self.pool.tasks[0], self.top, self.held_out)

    @property
    def layout(self) -> Layout:
        """See `Sampler.layout`."""
        return "contiguous"

    def trajectories_at(self, seed: int, step: int) -> int:
        """See `Sampler.trajectories_at`."""
        return 1

    def shape(self, seed: int, step: int) -> tuple[int, int]:
        """See `Sampler.shape`."""
        return self.windows, self.window

    def _drawn(self, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Episode and first step ``[B]`` of each window, negative where it begins too early."""
        rng, offsets = generator(seed, step), self.pool.store.offsets
        episodes = rng.choice(self._episodes, self.windows)
        length = offsets[episodes + 1] - offsets[episodes] - 1
        # Windows drawn to begin before the first step are moved to it, else first steps would be K
        # times rarer than others, and an agent that cannot begin stands still for ever.
        return episodes, rng.integers(1 - self.window, length // self.chunk - self.window + 1)

    def part(self, seed: int, step: int, rows: np.ndarray, steps: np.ndarray) -> Batch:
        """See `Sampler.part`."""
        store, task = self.pool.store, self.pool.tasks[0]
        episodes, first = (each[rows] for each in self._drawn(seed, step))
        begin = store.offsets[episodes]
        length = store.offsets[episodes + 1] - begin - 1
        padding = np.broadcast_to(steps >= self.window, (len(rows), len(steps)))
        timestep = np.maximum(first, 0)[:, None] + np.where(padding, 0, steps)
        at = begin[:, None] + timestep * self.chunk  # the observation before each step, [B, K]
        earned, scale = self._earned, self.pool.best_return(task)
        to_go = self.pool.returns[task][episodes, None] - (earned[at] - earned[begin, None])
        gained = earned[at + self.chunk] - earned[at]
        reward = token_reward(gained, steps_in(length, self.chunk)[:, None], scale)
        action = store.field("action")[at[..., None] + 1 + np.arange(self.chunk)]
        action = action.reshape(*padding.shape, -1)
        nothing = np.zeros((*padding.shape, 1), np.float32)
        return Batch(
            return_to_go=(to_go / scale).astype(np.float32)[..., None],
            observation=self.normalizer(store.field("observation")[at]),
            action=action,
            reward=reward.astype(np.float32)[..., None],
            completion=nothing,
            previous_action=np.zeros_like(action),
            previous_reward=nothing,
            previous_completion=nothing,
            timestep=timestep.astype(np.int32),
            trajectory=np.zeros(padding.shape, np.int32),
            order=np.where(padding, PADDING, steps).astype(np.int32),
            chain=np.where(padding, 0, rows[:, None]).astype(np.int32),
            loss_mask=(~padding).astype(np.float32),
        )

    def names(self, seed: int, step: int) -> Iterator[str]:
        """See `Sampler.names`."""
        for row, (episode, first) in enumerate(zip(*self._drawn(seed, step), strict=True)):
            yield f"window {row}: episode {episode} from step {max(0, first)}"


def gapped(index_range: int, seed: int, step: int, row: int, count: int) -> np.ndarray:
    """Trajectory indices of one chain: a sorted random subset of 0…index_range−1, int ``[n]``."""
    rng = generator(seed, step, row, _GAPS)
    return np.sort(rng.choice(index_range, count, replace=False))


def generator(seed: int, *key: int) -> np.random.Generator:
    """Random numbers of their own for every key of one seed, such as a step and a row."""
    # A spawn key, not a longer seed: NumPy pads seeds with zeros, so (1, 2) and (1, 2, 0) collide.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
