"""The arrays that closed forms read."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class States:
    """Any number of states of one domain.

    Attributes:
        physics: `[..., P]` float64 simulator states.
        observation: `[..., O]` of the same states.
    """

    physics: np.ndarray
    observation: np.ndarray
