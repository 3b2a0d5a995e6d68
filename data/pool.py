"""The pool: a store's episodes under one or several tasks, split into training and held out."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from data.hindsight import Trajectory
from data.normalize import Normalizer
from exorl import EpisodeStore, relabel

BEST_QUANTILE = 0.99
"""A task's attainable return is this quantile of the training returns: the best, less luck."""


@dataclass(frozen=True)
class Pool:
    """Episodes of one store, relabelled for every task.

    Attributes:
        store: where the episodes lie.
        tasks: names; more than one means the task of a chain is hidden from the agent.
        training: ``[N]`` int64, episodes that chains are drawn from.
        held_out: ``[M]`` int64, episodes never trained on: for evaluation's contexts and errors.
        rewards: by task, ``[rows]`` float32 over all rows of the store.
        returns: by task, ``[N + M]`` float64 over all episodes of the store.
    """

    store: EpisodeStore
    tasks: tuple[str, ...]
    training: np.ndarray
    held_out: np.ndarray
    rewards: Mapping[str, np.ndarray]
    returns: Mapping[str, np.ndarray]

    @classmethod
    def load(cls, store: EpisodeStore, tasks: tuple[str, ...], holdout: float = 0.2) -> "Pool":
        """Relabel a store for the tasks and hold out every k-th episode.

        Holding out at a stride keeps both parts spread over the collectors' learning.

        Raises:
            ValueError: no task, a holdout outside [0, 0.5], too few episodes to split, or a task
                on which (nearly) no episode scores.
        """
        if not tasks:
            raise ValueError("a pool needs at least one task, got none")
        if not 0 <= holdout <= 0.5:
            raise ValueError(f"holdout must lie between 0 and 0.5, got {holdout}")
        episodes = np.arange(len(store))
        stride = round(1 / holdout) if holdout else len(store) + 1
        held_out = episodes % stride == stride - 1
        if not (~held_out).any() or (holdout and not held_out.any()):
            raise ValueError(
                f"{len(store)} episodes in {store.path} cannot be split with holdout={holdout}; "
                f"collect at least {stride}"
            )
        pool = cls(
            store=store,
            tasks=tasks,
            training=episodes[~held_out],
            held_out=episodes[held_out],
            rewards={task: relabel.rewards(store, task) for task in tasks},
            returns={task: relabel.returns(store, task) for task in tasks},
        )
        unscored = [task for task in tasks if not pool.best_return(task) > 0]
        if unscored:
            raise ValueError(
                f"no training episode in {store.path} scores under {', '.join(unscored)}: returns "
                f"cannot be scaled; collect episodes that do"
            )
        return pool

    def trajectory(self, episode: int, task: str) -> Trajectory:
        """An episode as decisions under a task, without ExoRL's dummy first row."""
        stored = self.store[episode]
        begin, end = self.store.offsets[episode : episode + 2]
        return Trajectory(
            observation=stored.observation[:-1],
            action=stored.action[1:],
            reward=self.rewards[task][begin + 1 : end],
        )

    def best_return(self, task: str) -> float:
        """The task's attainable return, the `BEST_QUANTILE` of the training returns (raw)."""
        return self._best_returns[task]

    @cached_property
    def _best_returns(self) -> dict[str, float]:
        return {
            task: float(np.quantile(self.returns[task][self.training], BEST_QUANTILE))
            for task in self.tasks
        }

    def part(self, held_out: bool) -> np.ndarray:
        """The held-out episodes, or those for training."""
        return self.held_out if held_out else self.training

    def best(self, task: str, fraction: float, held_out: bool = False) -> np.ndarray:
        """The best ``fraction`` of the training (or held-out) episodes by a task, at least one."""
        episodes = self.part(held_out)
        count = max(1, int(np.ceil(fraction * len(episodes))))
        order = np.argsort(-self.returns[task][episodes], kind="stable")
        return episodes[order[:count]]

    def normalizer(self) -> Normalizer:
        """Standardisation fitted on the training episodes."""
        return Normalizer.fit(
            np.concatenate([self.store[episode].observation for episode in self.training])
        )
