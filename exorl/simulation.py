"""Many episodes of one task in lock step, for collecting data and evaluating policies."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from exorl import suite
from exorl.rewards import DOMAINS, reward
from exorl.tasks import task as find_task


class Step(NamedTuple):
    """What B episodes look like after one step, in fresh arrays."""

    observation: np.ndarray  # [B, O] float32
    reward: np.ndarray  # [B] float32, zeros after a reset
    physics: np.ndarray  # [B, P] float64


class SimulationError(RuntimeError):
    """A simulated state became NaN or infinite."""


class Simulation:
    """B independent episodes: the same numbers as `make(task)`, several times as fast.

    MuJoCo steps each episode's state on one shared model. Observations and rewards are read from
    all states at once by the closed forms of `exorl.domains`. Time limits are the caller's: an
    episode is over after `task.episode_length` steps.
    """

    def __init__(self, task: str, size: int):
        """Builds `size` episodes; `reset` starts them."""
        self.task = find_task(task)
        self.size = size
        self._start = suite.load(task, seed=0)  # makes the initial states
        import mujoco  # not at the top: `suite.load` first checks that its version fits

        self._mujoco: Any = mujoco  # a compiled module whose members pyright can't see
        self._model = self._start.physics.model.ptr
        # A state that diverges must show as NaN, not restart unseen.
        self._model.opt.disableflags |= self._mujoco.mjtDisableBit.mjDSBL_AUTORESET
        self._substeps = round(self._start.control_timestep() / self._start.physics.timestep())
        self._bounds = self._model.actuator_ctrlrange.T
        self._data = [self._mujoco.MjData(self._model) for _ in range(size)]
        # Views into MuJoCo's memory: fetching them anew would cost more than the copies.
        self._controls = [data.ctrl for data in self._data]
        self._states = [part for data in self._data for part in (data.qpos, data.qvel, data.act)]

    def reset(self, seeds: Sequence[int]) -> Step:
        """Starts each episode where dm_control's environment with `random=seed` does."""
        if len(seeds) != self.size:
            raise ValueError(f"expected {self.size} seeds, one an episode, got {len(seeds)}")
        for data, seed in zip(self._data, seeds, strict=True):
            self._start.task.random.seed(seed)
            self._start.reset()
            self._mujoco.mj_copyData(data, self._model, self._start.physics.data.ptr)
        physics = self._physics()
        return Step(self._observation(physics), np.zeros(self.size, np.float32), physics)

    def step(self, action: np.ndarray) -> Step:
        """Advances all episodes by actions `[B, A]`, clipped to [-1, 1].

        Raises:
            ValueError: The actions have another shape or are not finite.
            SimulationError: A state diverged.
        """
        action = np.asarray(action, np.float32)
        if action.shape != (self.size, self.task.action_dim):
            expected = (self.size, self.task.action_dim)
            raise ValueError(f"actions have shape {action.shape}, expected {expected}")
        advance, model, substeps = self._mujoco.mj_step, self._model, self._substeps
        controls = suite.scale(action, *self._bounds)
        for data, view, control in zip(self._data, self._controls, controls, strict=True):
            view[:] = control
            # dm_control's order (mj_step2, then mj_step1 to refresh what can be read) advances
            # qpos and qvel the same to the bit, and nothing else is read here.
            advance(model, data, substeps)
        physics = self._physics()
        if not np.isfinite(physics).all():
            bad = np.flatnonzero(~np.isfinite(physics).all(axis=-1)).tolist()
            raise SimulationError(f"{self.task.name}: the states of episodes {bad} diverged")
        observation = self._observation(physics)
        return Step(observation, reward(self.task.name, observation, action, physics), physics)

    def _physics(self) -> np.ndarray:
        return np.concatenate(self._states).reshape(self.size, -1)

    def _observation(self, physics: np.ndarray) -> np.ndarray:
        return DOMAINS[self.task.domain].observation(physics).astype(np.float32)
