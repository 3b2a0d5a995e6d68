"""Chain of hindsight (Liu & Abbeel 2023, arXiv 2305.16554): sort by return, relabel the targets.

Everything here is pure NumPy on one chain; drawing the trajectories is `data.sampling`'s work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Relabel = Literal["best", "own"]
"""Whose return a trajectory's target is: the chain's best (hindsight), or its own."""

ContextOrder = Literal["ascending", "shuffled", "descending"]
"""Order of the context by return; the best trajectory is last in all of them."""


@dataclass(frozen=True)
class Trajectory:
    """One episode as decisions: at step t the agent sees observation[t] and takes action[t].

    Attributes:
        observation: ``[T, O]`` float32.
        action: ``[T, A]`` float32 in [-1, 1].
        reward: ``[T]`` floating, ``reward[t]`` earned by ``action[t]``.
    """

    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray

    def __len__(self) -> int:
        return len(self.action)

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of rewards, accumulated in float64."""
        return float(self.reward.sum(dtype=np.float64))


@dataclass(frozen=True)
class Chain:
    """Trajectories in the order they are shown in, each with its target return.

    Attributes:
        trajectories: n trajectories; the last one has the highest return.
        targets: raw return-to-go at the start of each: the chain's best return for all of them, or
            their own (see `Relabel`); in evaluation the return that is asked for.
        scale: the return that counts as 1 when packed.
    """

    trajectories: tuple[Trajectory, ...]
    targets: tuple[float, ...]
    scale: float


def ascending(returns: Sequence[float] | np.ndarray) -> np.ndarray:
    """Indices that sort returns from worst to best; equal returns keep their order."""
    return np.argsort(np.asarray(returns, np.float64), kind="stable")


def returns_to_go(reward: np.ndarray, target: float) -> np.ndarray:
    """R̂_0 = target and R̂_{t+1} = R̂_t − r_t, for rewards ``[T]``.

    The sum runs in float64, so that 1,000 small rewards lose nothing before the cast.

    Returns:
        ``[T]`` float32; entry t is what is still wanted before ``action[t]`` is taken.
    """
    earned_before = np.cumsum(reward, dtype=np.float64) - reward
    return (target - earned_before).astype(np.float32)


def chain(
    trajectories: Sequence[Trajectory],
    *,
    target: float | None = None,
    scale: float = 1.0,
    relabel: Relabel = "best",
    context: ContextOrder = "ascending",
    rng: np.random.Generator | None = None,
) -> Chain:
    """Sort trajectories by return and give them their target returns.

    Args:
        trajectories: n ≥ 1 trajectories in any order.
        target: raw target return of all; None takes it from the returns as ``relabel`` says.
        scale: the return that counts as 1, positive.
        relabel: whose return a trajectory's target is.
        context: order of all but the best, which is always last.
        rng: shuffles a ``shuffled`` context.

    Raises:
        ValueError: no trajectories, a scale that is not a positive number, or nothing to shuffle
            by.
    """
    if not trajectories:
        raise ValueError("a chain of hindsight needs at least one trajectory, got none")
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"the scale of returns must be a positive number, got {scale}")
    returns = [trajectory.episode_return for trajectory in trajectories]
    order = arranged(returns, context, rng)
    best = returns[order[-1]] if target is None else float(target)
    own = relabel == "own" and target is None
    return Chain(
        trajectories=tuple(trajectories[i] for i in order),
        targets=tuple(returns[i] if own else best for i in order),
        scale=float(scale),
    )


def arranged(
    returns: Sequence[float], context: ContextOrder, rng: np.random.Generator | None = None
) -> np.ndarray:
    """Indices that put the best return last and the others in the order asked for.

    Raises:
        ValueError: an order to shuffle, and no generator.
    """
    order = ascending(returns)
    if context == "descending":
        return np.append(order[-2::-1], order[-1]) if len(order) > 1 else order
    if context == "shuffled":
        if rng is None:
            raise ValueError("a shuffled context needs a random generator")
        return np.append(rng.permutation(order[:-1]), order[-1])
    return order
