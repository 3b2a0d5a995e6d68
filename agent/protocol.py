"""How an agent is evaluated: what precedes its own episodes, and what return it is asked for.

n is the number of trajectories in the sequence, the one being acted in included. Returns here are
in units of the task's attainable return (`data.Pool.best_return`), as the network sees them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from agent.config import TrainConfig
from data.hindsight import Trajectory, ascending
from data.pool import Pool
from exorl.tasks import task as task_of

Context = Literal[
    "empty",
    "self",
    "self_resorted",
    "dataset_sorted",
    "dataset_shuffled",
    "dataset_topk",
    "dataset_bottomk",
    "mixed",
    "wrong_task",
]
"""What precedes an own episode:

    empty             nothing.
    self              the chain's own earlier episodes, n − 1 at most.
    self_resorted     the same in ascending order, computed anew before each episode.
    dataset_sorted    n − 1 episodes of the data, drawn at random, ascending by return.
    dataset_shuffled  the same in random order.
    dataset_topk      the n − 1 best, ascending: the same for all chains.
    dataset_bottomk   the n − 1 worst, ascending: the same for all chains.
    mixed             n // 2 episodes of the data, ascending, then own ones.
    wrong_task        dataset_sorted under another task of the hidden group.
"""

FULL = ("dataset_sorted", "dataset_shuffled", "dataset_topk", "dataset_bottomk", "wrong_task")
"""Contexts that leave room for one own episode."""

Source = Literal["held_out", "training"]
Goal = Literal["attainable", "dataset", "context", "task"]


@dataclass(frozen=True)
class Protocol:
    """One way to evaluate.

    Attributes:
        context: what precedes the own episodes.
        n: most trajectories in the sequence; for baselines, which have none, their episodes.
        episodes: own episodes a chain, by default as many as there is room for.
        target: return asked for: `attainable` the 99 % quantile of the training returns, or the
            best of the context if that is higher; `dataset` the best of the data; `context` the
            best of the context; `task` the most the task can give; or a raw return.
        multiplier: of the target.
        stale: when an own episode beats the target, the returns-to-go before it are too low:
            `keep` them and label what follows, or ask for the new best and `reprefill`.
        beyond: when there is no room for another trajectory, `evict` the oldest from the cache and
            label what follows, or `reprefill` without it.
        envs: environments under each context of a chain, which share its prefix.
        share_prefix: keep the prefix computed for a multiplier of 1 for all of them.
        allow_low_target: ask for less than the best of the context.
        extrapolate: let n exceed what was trained.
        source: the part of the data that contexts are drawn from.
        cache: dtype of cached keys and values; None is the network's own.
    """

    context: Context
    n: int
    episodes: int | None = None
    target: Goal | float = "attainable"
    multiplier: float = 1.0
    stale: Literal["keep", "reprefill"] = "keep"
    beyond: Literal["evict", "reprefill"] = "evict"
    envs: int = 1
    share_prefix: bool = False
    allow_low_target: bool = False
    extrapolate: bool = False
    source: Source = "held_out"
    cache: Literal["float32", "bfloat16"] | None = None

    @property
    def drawn(self) -> int:
        """Episodes of the data that precede the own ones."""
        if self.context in FULL:
            return self.n - 1
        return self.n // 2 if self.context == "mixed" else 0

    @property
    def room(self) -> int:
        """Most trajectories in the sequence, the one being acted in included."""
        return 1 if self.context == "empty" else self.n

    @property
    def own(self) -> int:
        """Own episodes a chain."""
        return self.episodes or self.room - self.drawn

    def check(self, config: TrainConfig, pool: Pool) -> None:
        """Refuse what an agent or its data cannot do.

        Raises:
            ValueError: says what, and what can be done.
        """
        if self.n < 1 or (self.episodes is not None and self.episodes < 1) or self.envs < 1:
            raise ValueError(
                f"n, episodes and envs must be at least 1, got n={self.n}, "
                f"episodes={self.episodes}, envs={self.envs}"
            )
        asked = self.target if isinstance(self.target, float) else 1.0
        if not (np.isfinite(asked * self.multiplier) and asked * self.multiplier > 0):
            raise ValueError(
                f"a target must be a positive return, got {self.target} × {self.multiplier}"
            )
        if self.target == "context" and not self.drawn:
            raise ValueError(f"context {self.context} holds no episodes to take a target from")
        if config.method != "at":
            if self.context != "self":
                raise ValueError(
                    f"method {config.method} takes no context, asked for {self.context}"
                )
            return
        self._check_length(config)
        self._check_source(pool)

    def _check_length(self, config: TrainConfig) -> None:
        trained, data = config.data.trajectories, config.data
        if self.n <= (data.index_range or trained):
            return
        if config.model.positions == "learned":
            raise ValueError(
                f"n={self.n}, but the agent has learned {data.index_range or trained} positions of "
                f"trajectories and no others; use fewer, or train with data.trajectories={self.n}"
            )
        if not self.extrapolate:
            raise ValueError(
                f"n={self.n}, but the agent was trained with at most {trained} trajectories; use "
                f"fewer, or --extrapolate, which labels the result"
            )

    def _check_source(self, pool: Pool) -> None:
        if self.context == "wrong_task" and len(pool.tasks) < 2:
            raise ValueError(
                f"a wrong task needs a hidden group, the agent knows only {pool.tasks}"
            )
        there = pool.part(self.source == "held_out")
        if self.drawn > len(there):
            raise ValueError(
                f"a context of {self.drawn} {self.source.replace('_', '-')} episodes cannot be "
                f"drawn from {len(there)} in {pool.store.path}; use a smaller n, or --source "
                f"training, which has {len(pool.training)}"
            )
        if self.drawn:
            self._check_lengths(pool, there)

    def _check_lengths(self, pool: Pool, there: np.ndarray) -> None:
        """Chains are stacked, and trajectories evicted, as if all had the environment's length."""
        length = task_of(pool.tasks[0]).episode_length
        lengths = np.diff(pool.store.offsets)[there] - 1  # a store's first row is no step
        others = there[lengths != length]
        if len(others):
            raise ValueError(
                f"episode {others[0]} of {pool.store.path} has {lengths[lengths != length][0]} "
                f"steps, those of the environment have {length}, and contexts need episodes as "
                f"long; pack whole ones, or use --context self"
            )

    def shown(self, tasks: Sequence[str], task: str) -> str:
        """The task whose rewards the drawn episodes show."""
        if self.context != "wrong_task":
            return task
        return tasks[(list(tasks).index(task) + 1) % len(tasks)]

    def draw(self, pool: Pool, task: str, scale: float, chain: int, seed: int) -> list[Trajectory]:
        """The episodes that precede a chain, in their order, rewards in units of ``scale``.

        Args:
            pool: where they are drawn from, without replacement.
            task: whose rewards they show.
            scale: raw return that counts as 1.
            chain: index of the chain; the same episodes for all ways to arrange as many.
            seed: of the draw.
        """
        there, returns = pool.part(self.source == "held_out"), pool.returns[task]
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(chain,)))
        if self.context in ("dataset_topk", "dataset_bottomk"):
            ranked = there[ascending(returns[there])]
            first = len(ranked) - self.drawn if self.context == "dataset_topk" else 0
            episodes = ranked[first : first + self.drawn]
        else:
            episodes = rng.choice(there, self.drawn, replace=False)
            episodes = episodes[ascending(returns[episodes])]
        if self.context == "dataset_shuffled":
            episodes = rng.permutation(episodes)
        found = (pool.trajectory(int(episode), task) for episode in episodes)
        return [replace(each, reward=each.reward / np.float64(scale)) for each in found]

    def goal(self, pool: Pool, task: str, scale: float, context: Sequence[Trajectory]) -> float:
        """The return asked for after a context, in units of ``scale``.

        Raises:
            ValueError: it is below the best of the context, and that was not allowed.
        """
        best = best_return(context)
        found = {
            "attainable": max(1.0, best),
            "dataset": float(pool.returns[task].max()) / scale,
            "context": best,
            "task": task_of(task).episode_length / scale,
        }
        goal = found[self.target] if isinstance(self.target, str) else self.target / scale
        goal *= self.multiplier
        if beats(best, goal) and not self.allow_low_target:
            raise ValueError(
                f"a target of {goal * scale:.1f} is below the best of the context, "
                f"{best * scale:.1f}, which no training chain's is; use --allow-low-target, which "
                f"labels the result, or a larger --multiplier"
            )
        return goal


def best_return(trajectories: Sequence[Trajectory]) -> float:
    """The best return of some trajectories, 0 of none."""
    return max((each.episode_return for each in trajectories), default=0.0)


def beats(earned: ArrayLike, target: ArrayLike) -> np.ndarray:
    """Whether returns in units exceed targets by more than rounding does."""
    return np.asarray(earned) > np.asarray(target) + 1e-6
