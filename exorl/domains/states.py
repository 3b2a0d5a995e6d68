"""What closed forms read, and what takes their place where MuJoCo measures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

# MuJoCo's bindings are compiled and tell no types.
MjModel = Any
MjData = Any

Meter = Callable[[MjData], tuple[float, ...]]
"""Reads a domain's `Measured` off a state that was just set."""


@dataclass(frozen=True)
class States:
    """Any number of states of one domain.

    Attributes:
        physics: `[..., P]` float64 simulator states.
        observation: `[..., O]` of the same states.
    """

    physics: np.ndarray
    observation: np.ndarray
