"""Chain of hindsight (Liu & Abbeel 2023, arXiv 2305.16554): sort by return, relabel the targets.

Everything here is pure NumPy on one chain; drawing the trajectories is `data.sampling`'s work.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Trajectory:
    """One episode as decisions: at step t the agent sees observation[t] and takes action[t].

    Attributes:
        observation: ``[T, O]`` float32.
        action: ``[T, A]`` float32 in [-1, 1].
        reward: ``[T]`` float32, ``reward[t]`` earned by ``action[t]``.
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
    """Trajectories ascending by return, with the one target return that all of them are given.

    Attributes:
        trajectories: n trajectories; the last one has the highest return.
        target: raw return-to-go at the start of every trajectory (the chain's best return in
            training, the asked-for return in evaluation).
        scale: the return that counts as 1 when packed.
    """

    trajectories: tuple[Trajectory, ...]
    target: float
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
    trajectories: Sequence[Trajectory], *, target: float | None = None, scale: float = 1.0
) -> Chain:
    """Sort trajectories ascending by return and give all of them one target return.

    Args:
        trajectories: n ≥ 1 trajectories in any order.
        target: raw target return; None takes the best return in the chain (training).
        scale: the return that counts as 1, positive.

    Raises:
        ValueError: no trajectories, or a scale that is not a positive number.
    """
    if not trajectories:
        raise ValueError("a chain of hindsight needs at least one trajectory, got none")
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"the scale of returns must be a positive number, got {scale}")
    returns = [trajectory.episode_return for trajectory in trajectories]
    order = ascending(returns)
    best = returns[order[-1]]
    return Chain(
        trajectories=tuple(trajectories[i] for i in order),
        target=best if target is None else float(target),
        scale=float(scale),
    )
