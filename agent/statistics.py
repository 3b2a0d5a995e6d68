"""Returns to scores: what a chain of episodes is worth, and how sure one can be."""

from typing import NamedTuple

import numpy as np
from scipy import stats


class Estimate(NamedTuple):
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


SUMMARIES = {
    "first": lambda returns: returns[:, 0],
    "last": lambda returns: returns[:, -1],
    "mean": lambda returns: returns.mean(axis=1),
    "max": lambda returns: returns.max(axis=1),
}
"""By name, ``[chains, episodes]`` → one value a chain. ``max`` grows with the number of episodes
even when nothing is learnt (+1.03σ at 4), so it only compares with a best-of-n over the same n."""


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
    values = np.asarray(values, np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"an interval needs finite values and at least one, got {values}")
    mean = float(values.mean())
    if np.ptp(values) == 0:
        return Estimate(mean, mean, mean)
    interval = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=resamples,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(mean, float(interval.low), float(interval.high))
