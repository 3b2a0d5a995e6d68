"""Returns to scores: what a chain of episodes is worth, and how sure one can be.

IQM, performance profiles and the probability of improvement are those of Agarwal et al. 2021, "Deep
RL at the edge of the statistical precipice" (arXiv 2108.13264); the resampling unit is a training
seed, then a chain.
"""

from collections.abc import Callable, Sequence
from math import comb
from typing import NamedTuple

import numpy as np
from scipy import stats

SEEDS_FOR_A_CLAIM = 5
"""With fewer training seeds an interval says nothing about other seeds."""

Statistic = Callable[[np.ndarray, int], np.ndarray]
"""(values, axis) → what is to be known of the values along the axis."""

Scores = Sequence[Sequence[np.ndarray]]
"""By task, then by training seed: ``[chains]``, equally many of every seed of a task."""


class Estimate(NamedTuple):
    """A statistic with its 95 % interval."""

    mean: float
    low: float
    high: float


SUMMARIES = {
    "first": lambda returns: returns[..., 0],
    "last": lambda returns: returns[..., -1],
    "mean": lambda returns: returns.mean(axis=-1),
    "max": lambda returns: returns.max(axis=-1),
    "area": lambda returns: area(returns),
}
"""By name, ``[…, episodes]`` → ``[…]``. ``max`` grows with the number of episodes even when nothing
is learnt (+1.03σ at 4), so it only compares with a best-of-n over the same n."""


def area(returns: np.ndarray) -> np.ndarray:
    """Area under the curve of returns ``[…, episodes]`` by trapezoids, over its width.

    So in units of a return; of a single episode it is the return.
    """
    if returns.shape[-1] == 1:
        return returns[..., 0]
    return np.trapezoid(returns, axis=-1) / (returns.shape[-1] - 1)


def best_of(returns: np.ndarray, n: int) -> float:
    """Expected best of n of the episodes ``[m]``, drawn without replacement; n ≤ m.

    The mean over all subsets: Σ_i x_(i) C(i − 1, n − 1) / C(m, n) over ascending x.

    Raises:
        ValueError: there are fewer than n.
    """
    ordered = np.sort(np.asarray(returns, np.float64))
    if not 1 <= n <= len(ordered):
        raise ValueError(f"the best of {n} of {len(ordered)} episodes is not defined")
    weights = [comb(i, n - 1) / comb(len(ordered), n) for i in range(len(ordered))]
    return float(ordered @ weights)


def iqm(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Interquartile mean: of the middle half of the values along an axis.

    A quarter of the values is cut off at each end, rounded down to whole values.
    """
    return stats.trim_mean(values, 0.25, axis=axis)


def bootstrap(values: np.ndarray, *, seed: int = 0, resamples: int = 2_000) -> Estimate:
    """Mean of independent values (one a chain) with a percentile bootstrap interval.

    Two-peaked scores (a task guessed right or wrong) rule out a normal interval. One value, or
    equal values, give an interval of no width: it says nothing about other seeds.

    Args:
        values: ``[n]``, one value a resampling unit.
        seed: of the resampling.
        resamples: how many.

    Raises:
        ValueError: no values, or one that is not finite.
    """
    return stratified([[values]], np.mean, seed=seed, resamples=resamples)


def stratified(
    scores: Scores, statistic: Statistic, *, seed: int = 0, resamples: int = 2_000
) -> Estimate:
    """A statistic of all scores with a stratified percentile bootstrap interval.

    Tasks are strata, never resampled. Of each, training seeds are resampled and then each one's
    chains; with fewer than `SEEDS_FOR_A_CLAIM` seeds only chains are, and the interval is of these
    seeds alone.

    Args:
        scores: of each task and training seed.
        statistic: of all values together, in one array.
        seed: of the resampling.
        resamples: how many.

    Raises:
        ValueError: no values, or one that is not finite.
    """
    tasks = [[np.asarray(values, np.float64) for values in task] for task in scores]
    for values in (values for task in tasks for values in task):
        if values.size == 0 or not np.isfinite(values).all():
            raise ValueError(f"an interval needs finite values and at least one, got {values}")
    rng = np.random.default_rng(seed)

    def resampled(task: list[np.ndarray]) -> np.ndarray:
        chains = np.stack(task)
        which = np.broadcast_to(np.arange(len(task)), (resamples, len(task)))
        if len(task) >= SEEDS_FOR_A_CLAIM:
            which = rng.integers(len(task), size=which.shape)
        drawn = rng.integers(chains.shape[1], size=(*which.shape, chains.shape[1]))
        return chains[which[..., None], drawn].reshape(resamples, -1)

    whole = statistic(np.concatenate([np.ravel(task) for task in tasks]), -1)
    found = statistic(np.concatenate([resampled(task) for task in tasks], axis=1), -1)
    low, high = np.quantile(found, [0.025, 0.975])
    return Estimate(float(whole), float(low), float(high))


def improvement(ours: Scores, theirs: Scores) -> float:
    """Probability that a chain of ours beats one of theirs, mean over tasks; ties count half.

    The Mann-Whitney U statistic over the number of pairs.
    """
    found = []
    for own, other in zip(ours, theirs, strict=True):
        x, y = np.concatenate(list(own)), np.concatenate(list(other))
        difference = x[:, None] - y[None, :]
        found.append(np.mean((difference > 0) + 0.5 * (difference == 0)))
    return float(np.mean(found))


def profile(values: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Performance profile: the part of all values above each threshold."""
    return (np.ravel(values)[:, None] > np.asarray(thresholds)[None, :]).mean(axis=0)
