"""Standardised observations; the statistics travel with the checkpoint."""

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
    def fit(cls, observations: np.ndarray) -> "Normalizer":
        """Statistics of observations ``[..., O]``, accumulated in float64."""
        flat = observations.reshape(-1, observations.shape[-1])
        mean = flat.mean(axis=0, dtype=np.float64)
        deviation = np.maximum(flat.std(axis=0, dtype=np.float64), MINIMUM_DEVIATION)
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
