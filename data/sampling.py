"""Batches as pure functions of (seed, step): nothing to save, nothing to restore."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.batches import Batch, stack
from data.hindsight import Chain, chain
from data.normalize import Normalizer
from data.packing import SLOTS, pack, steps_in, token_reward
from data.pool import Pool


def trajectory_counts(largest: int) -> list[int]:
    """What n is drawn from: 1…N up to eight, then only powers of two (few compiled shapes)."""
    powers = [2**k for k in range(4, 31) if 2**k < largest]
    return sorted({*range(1, min(largest, 8) + 1), *powers, largest})


@dataclass(frozen=True)
class ChainSampler:
    """Draws chains of hindsight for the Agentic Transformer.

    The last trajectory comes from the best ``top`` of the pool under the chain's task and the
    context uniformly, then all are sorted (In-Context Decision Transformer's sampler; ``top=1``
    is the Agentic Transformer paper's). With several tasks each chain is relabelled with one of
    them, untold. Rewards and returns-to-go are scaled by the task's attainable return, so that
    a target of 1 means the best for every task and the scale does not tell which it is.

    Attributes:
        pool: episodes and rewards.
        normalizer: applied to observations.
        packing: tokens a step, see `data.packing.SLOTS`.
        chunk: environment steps in one step.
        trajectories: N, the most trajectories in a chain.
        fixed: always N trajectories, instead of n drawn from `trajectory_counts` for each batch.
        top: fraction of the pool that the last trajectory is drawn from.
        batch_tokens: tokens in a batch, about; the number of chains follows from it and n.
        shards: the number of chains is a multiple of it (mesh.data × mesh.fsdp).
    """

    pool: Pool
    normalizer: Normalizer
    packing: str
    chunk: int
    trajectories: int
    fixed: bool
    top: float
    batch_tokens: int
    shards: int = 1

    @cached_property
    def _best(self) -> dict[str, np.ndarray]:
        return {task: self.pool.best(task, self.top) for task in self.pool.tasks}

    def count(self, seed: int, step: int) -> int:
        """n, the trajectories in every chain of this step's batch."""
        if self.fixed:
            return self.trajectories
        return int(_rng(seed, step).choice(trajectory_counts(self.trajectories)))

    def chains(self, count: int) -> int:
        """Chains in a batch whose chains have ``count`` trajectories."""
        longest = int(np.diff(self.pool.store.offsets).max()) - 1
        tokens = count * steps_in(longest, self.chunk) * len(SLOTS[self.packing])
        return self.shards * max(1, self.batch_tokens // (tokens * self.shards))

    def chain(self, seed: int, step: int, row: int, count: int) -> Chain:
        """The chain in one row of this step's batch.

        Raises:
            ValueError: more trajectories than there are training episodes.
        """
        pool = self.pool
        if count > len(pool.training):
            raise ValueError(
                f"a chain of {count} trajectories needs as many training episodes, "
                f"{pool.store.path} has {len(pool.training)}"
            )
        rng = _rng(seed, step, row)
        task = pool.tasks[rng.integers(len(pool.tasks))]
        last = rng.choice(self._best[task])
        others = rng.choice(pool.training[pool.training != last], count - 1, replace=False)
        drawn = [pool.trajectory(episode, task) for episode in (*others, last)]
        return chain(drawn, scale=pool.best_return(task))

    def batch(self, seed: int, step: int) -> Batch:
        """The batch of one training step, on the host, a pure function of (seed, step)."""
        count = self.count(seed, step)
        rows = [
            pack(self.chain(seed, step, row, count), chunk=self.chunk)
            for row in range(self.chains(count))
        ]
        batch = stack(rows)
        return batch._replace(observation=self.normalizer(batch.observation))


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
    """

    pool: Pool
    normalizer: Normalizer
    chunk: int
    window: int
    top: float
    windows: int

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
        return self.pool.best(self.pool.tasks[0], self.top)

    def batch(self, seed: int, step: int) -> Batch:
        """The batch of one training step, on the host, a pure function of (seed, step)."""
        store, task, rng = self.pool.store, self.pool.tasks[0], _rng(seed, step)
        episodes = rng.choice(self._episodes, self.windows)
        begin = store.offsets[episodes]
        length = store.offsets[episodes + 1] - begin - 1
        # Drawn as if windows reached across the beginning, else first steps would be K times rarer
        # than others, and an agent that cannot begin stands still for ever.
        first = rng.integers(1 - self.window, length // self.chunk - self.window + 1)
        timestep = np.maximum(first, 0)[:, None] + np.arange(self.window)
        rows = begin[:, None] + timestep * self.chunk  # the observation before each step, [B, K]
        earned, scale = self._earned, self.pool.best_return(task)
        to_go = self.pool.returns[task][episodes, None] - (earned[rows] - earned[begin, None])
        gained = earned[rows + self.chunk] - earned[rows]
        reward = token_reward(gained, steps_in(length, self.chunk)[:, None], scale)
        shape = (self.windows, self.window)
        action = store.field("action")[rows[..., None] + 1 + np.arange(self.chunk)]
        action = action.reshape(*shape, -1)
        return Batch(
            return_to_go=(to_go / scale).astype(np.float32)[..., None],
            observation=self.normalizer(store.field("observation")[rows]),
            action=action,
            reward=reward.astype(np.float32)[..., None],
            previous_action=np.zeros_like(action),
            previous_reward=np.zeros((*shape, 1), np.float32),
            timestep=timestep.astype(np.int32),
            trajectory=np.zeros(shape, np.int32),
            order=np.tile(np.arange(self.window, dtype=np.int32), (self.windows, 1)),
            loss_mask=np.ones(shape, np.float32),
        )


def _rng(seed: int, *key: int) -> np.random.Generator:
    # A spawn key, not a longer seed: NumPy pads seeds with zeros, so (1, 2) and (1, 2, 0) collide.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
