"""Standardised observations; the statistics travel with the checkpoint."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

MINIMUM_DEVIATION = 1e-3
"""Constant observations would otherwise be blown up by their own rounding."""


@dataclass(frozen=True)
class Normalizer:
    """Per-dimension mean and deviation of the training observations.

    Attributes:
        mean: ``[O]`` float32.
        deviation: ``[O]`` float32, at least `MINIMUM_DEVIATION`.
    """

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def fit(cls, episodes: Sequence[np.ndarray]) -> "Normalizer":
        """Statistics of one or more episodes' observations ``[T, O]``, accumulated in float64.

        One episode at a time is in memory; the result is, to the bit, that of all at once.
        """
        rows, width = sum(map(len, episodes)), episodes[0].shape[1]
        mean = _sum(episodes, width) / rows
        deviation = np.sqrt(_sum(((each - mean) ** 2 for each in episodes), width) / rows)
        deviation = np.maximum(deviation, MINIMUM_DEVIATION)
        return cls(mean.astype(np.float32), deviation.astype(np.float32))

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        """Standardise observations ``[..., O]``; float32."""
        return (observation - self.mean) / self.deviation

    def to_json(self) -> dict[str, list[float]]:
        """Plain lists; float32 values survive the trip through JSON exactly."""
        return {"mean": self.mean.tolist(), "deviation": self.deviation.tolist()}

    @classmethod
    def from_json(cls, values: dict[str, list[float]]) -> "Normalizer":
        """Inverse of `to_json`."""
        return cls(np.array(values["mean"], np.float32), np.array(values["deviation"], np.float32))


def _sum(parts: Iterable[np.ndarray], width: int) -> np.ndarray:
    """Over all rows of parts ``[T, O]``, float64 ``[O]``."""
    total = np.zeros((0, width))
    for part in parts:
        # Row after row, from what was summed before: as NumPy sums the rows of one array.
        total = np.concatenate([total, part]).sum(axis=0, keepdims=True)
    return total[0]
