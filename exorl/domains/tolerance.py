"""Soft indicators: 1 inside the wanted range, falling smoothly to the margin outside it.

The shapes are those of `dm_control.utils.rewards.tolerance` that ExoRL's tasks use, over arrays.
"""

import numpy as np


def at_least(x: np.ndarray, bound: float, margin: float) -> np.ndarray:
    """Gaussian below `bound`, 0.1 at `bound - margin`."""
    return _gaussian(np.maximum(bound - x, 0) / margin)


def at_least_linear(
    x: np.ndarray, bound: float, margin: float, value_at_margin: float
) -> np.ndarray:
    """Straight line below `bound` through `value_at_margin` at `bound - margin`, never negative."""
    distance = np.maximum(bound - x, 0) / margin
    return np.maximum(1 - (1 - value_at_margin) * distance, 0)


def at_most(x: np.ndarray, bound: float, margin: float) -> np.ndarray:
    """Gaussian above `bound`, 0.1 at `bound + margin`."""
    return _gaussian(np.maximum(x - bound, 0) / margin)


def near_zero(x: np.ndarray, margin: float) -> np.ndarray:
    """Gaussian around 0, 0.1 at a distance of `margin`."""
    return _gaussian(x / margin)


def near_zero_quadratic(x: np.ndarray, margin: float) -> np.ndarray:
    """Parabola around 0, 0 from a distance of `margin`."""
    return np.maximum(1 - np.square(x / margin), 0)


def _gaussian(distance: np.ndarray) -> np.ndarray:
    return np.exp(np.log(0.1) * np.square(distance))
