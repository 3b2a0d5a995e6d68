"""The pool: a store's episodes under one or several tasks, split into training and held out."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from data.hindsight import Trajectory
from data.normalize import Normalizer
from exorl import EpisodeStore, relabel
from exorl import task as find_task

BEST_QUANTILE = 0.99
"""A task's attainable return is this quantile of the training returns: the best, less luck."""

LEAST_REWARD = 1e-3
"""The attainable return must be at least so much a step: tolerances with Gaussian tails pay 1e-32
where nothing was reached, and divided by that, returns would be noise."""


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
        """Relabel a store for the tasks and hold a fraction of the episodes out.

        Both parts are evenly spread over the collectors' learning: episode i is held out where
        ``floor((i + 1) · holdout) > floor(i · holdout)``, for a fifth the last of every five.

        Raises:
            ValueError: no task, a holdout outside [0, 0.5], too few episodes to split, or a task
                under which (nearly) no episode scores.
        """
        if not tasks:
            raise ValueError("a pool needs at least one task, got none")
        if not 0 <= holdout <= 0.5:
            raise ValueError(f"holdout must lie between 0 and 0.5, got {holdout}")
        episodes = np.arange(len(store))
        held_out = spread(len(store), holdout)
        if not (~held_out).any() or (holdout and not held_out.any()):
            raise ValueError(
                f"{len(store)} episodes in {store.path} cannot be split with holdout={holdout}; "
                f"collect at least {math.ceil(1 / holdout) if holdout else 1}"
            )
        pool = cls(
            store=store,
            tasks=tasks,
            training=episodes[~held_out],
            held_out=episodes[held_out],
            rewards={task: relabel.rewards(store, task) for task in tasks},
            returns={task: relabel.returns(store, task) for task in tasks},
        )
        for task in tasks:
            _refuse_unscored(task, pool.best_return(task), store)
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
        return Normalizer.fit([self.store[episode].observation for episode in self.training])


def spread(count: int, fraction: float) -> np.ndarray:
    """Which of so many episodes make up a fraction of them, evenly spread; bool ``[count]``."""
    # As a fraction of integers: in floating point, 0.29 · 100 is less than 29.
    part = Fraction(fraction).limit_denominator(10**6)
    passed = np.arange(count + 1) * part.numerator // part.denominator
    return passed[1:] > passed[:-1]


def _refuse_unscored(task: str, best: float, store: EpisodeStore) -> None:
    """Refuse, by `ValueError`, a task whose returns are too small to be scaled by."""
    least = LEAST_REWARD * find_task(task).episode_length
    if best >= least:
        return
    if best == 0:
        found = f"fewer than 1 % of the training episodes in {store.path} score under {task}"
    else:
        found = (
            f"the training episodes in {store.path} score next to nothing under {task}: the 99 % "
            f"quantile of their returns is {best:.3g}, expected at least {least:g}"
        )
    raise ValueError(f"{found}; returns cannot be scaled by that, collect episodes that score")
