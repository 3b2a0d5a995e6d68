"""Simulated episodes that all processes of a run see alike."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from agent import processes
from exorl import Simulation, Step, task


class SharedSimulation:
    """Episodes that the first process steps and every process sees, to the bit.

    Other processes' simulators might round differently, and their policies would part.
    """

    def __init__(self, task_name: str, size: int) -> None:
        self.task, self._size = task(task_name), size
        self._own = Simulation(task_name, size) if processes.is_first() else None

    def reset(self, seeds: Sequence[int]) -> Step:
        """See `exorl.Simulation.reset`; states stay where they are."""
        return self._share(self._own and self._own.reset(seeds))

    def step(self, action: np.ndarray) -> Step:
        """See `exorl.Simulation.step`; states stay where they are."""
        return self._share(self._own and self._own.step(action))

    def _share(self, seen: Step | None) -> Step:
        mine = np.zeros((self._size, self.task.observation_dim), np.float32)
        earned = np.zeros(self._size, np.float32)
        told = (mine, earned) if seen is None else (seen.observation, seen.reward)
        observation, reward = map(np.asarray, multihost_utils.broadcast_one_to_all(told))
        return Step(observation, reward, np.empty((self._size, 0)))


Episodes = Simulation | SharedSimulation


def simulate(task_name: str, size: int) -> Episodes:
    """So many episodes of a task, stepped once for all processes."""
    if jax.process_count() == 1:
        return Simulation(task_name, size)
    return SharedSimulation(task_name, size)
