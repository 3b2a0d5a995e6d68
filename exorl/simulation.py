"""Many episodes of one task in lock step, for collecting data and evaluating policies."""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from exorl import suite
from exorl.backends import set_state
from exorl.domains import DOMAINS
from exorl.rewards import reward
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
    all states at once by the closed forms of `exorl.domains`; where sensors see more than the
    state holds, observations are read from each. Time limits are the caller's: an episode is over
    after `task.episode_length` steps.
    """

    def __init__(self, task: str, size: int):
        """Builds `size` episodes; `reset` starts them."""
        self.task = find_task(task)
        self.size = size
        self._start = suite.load(task, seed=0)  # makes the initial states
        self._start.reset()  # only now a manipulation environment has its final model
        self._mujoco = importlib.import_module("mujoco")  # its version fits, `suite.load` saw
        self._model = self._start.physics.model.ptr
        # A state that diverges must show as NaN, not restart unseen.
        self._model.opt.disableflags |= self._mujoco.mjtDisableBit.mjDSBL_AUTORESET
        self._substeps = round(self._start.control_timestep() / self._start.physics.timestep())
        self._scale = suite.scaling(*self._model.actuator_ctrlrange.T)
        self._data = [self._mujoco.MjData(self._model) for _ in range(size)]
        # Views into MuJoCo's memory: fetching them anew would cost more than the copies.
        self._controls = [data.ctrl for data in self._data]
        self._states = [part for data in self._data for part in (data.qpos, data.qvel, data.act)]
        sensors = getattr(DOMAINS[self.task.domain], "sensors", None)
        self._sense = sensors(self._model) if sensors else None

    def reset(self, seeds: Sequence[int]) -> Step:
        """Starts each episode where dm_control's environment with `random=seed` does."""
        if len(seeds) != self.size:
            raise ValueError(f"expected {self.size} seeds, one an episode, got {len(seeds)}")
        for data, seed in zip(self._data, seeds, strict=True):
            suite.reseed(self._start, seed)
            self._start.reset()
            self._mujoco.mj_copyData(data, self._model, self._start.physics.data.ptr)
        physics = self._physics()
        return Step(self._observation(physics), np.zeros(self.size, np.float32), physics)

    def place(self, physics: np.ndarray) -> None:
        """Puts the episodes into states `[B, P]`, their solvers starting afresh."""
        for data, state in zip(self._data, physics, strict=True):
            self._mujoco.mj_resetData(self._model, data)
            set_state(self._mujoco, self._model, data, state)
            self._mujoco.mj_step1(self._model, data)

    def step(self, action: np.ndarray) -> Step:
        """Advances all episodes by actions `[B, A]`, clipped to [-1, 1].

        Raises:
            ValueError: The actions have another shape or are not finite.
            SimulationError: A state diverged.
        """
        action = np.asarray(action, np.float32)
        physics = self._move(action)
        observation = self._observation(physics)
        return Step(observation, reward(self.task.name, observation, action, physics), physics)

    def _move(self, action: np.ndarray) -> np.ndarray:
        if action.shape != (self.size, self.task.action_dim):
            expected = (self.size, self.task.action_dim)
            raise ValueError(f"actions have shape {action.shape}, expected {expected}")
        controls = self._scale(action)
        for data, view, control in zip(self._data, self._controls, controls, strict=True):
            view[:] = control
            self._advance(data)
        physics = self._physics()
        if not np.isfinite(physics).all():
            bad = np.flatnonzero(~np.isfinite(physics).all(axis=-1)).tolist()
            raise SimulationError(f"{self.task.name}: the states of episodes {bad} diverged")
        return physics

    def _advance(self, data: Any) -> None:
        if self._sense is None:
            self._mujoco.mj_step(self._model, data, self._substeps)
            return
        # dm_control's order, to refresh what sensors and places are read from. It advances the
        # state the same to the bit.
        self._mujoco.mj_step2(self._model, data)
        self._mujoco.mj_step(self._model, data, self._substeps - 1)
        self._mujoco.mj_step1(self._model, data)

    def _physics(self) -> np.ndarray:
        return np.concatenate(self._states).reshape(self.size, -1)

    def _observation(self, physics: np.ndarray) -> np.ndarray:
        if self._sense is not None:
            return np.array([self._sense(data) for data in self._data], np.float32)
        return DOMAINS[self.task.domain].observation(physics).astype(np.float32)


def one_step(task: str, physics: np.ndarray, action: np.ndarray) -> np.ndarray:
    """Where actions `[N, A]` lead from states `[N, P]` in one control step, `[N, P]` float64.

    Within a simulated episode MuJoCo also starts its solver from the last step's forces, which
    the state does not hold: expect differences of 1e-7, and up to 1e-5 at contacts.

    Raises:
        TaskError: There is no such task.
        ValueError: The actions have another shape or are not finite.
        SimulationError: A state diverged.
    """
    simulation = Simulation(task, 1)
    result = np.empty(physics.shape, np.float64)
    for i in range(len(physics)):
        simulation.place(physics[i : i + 1])
        result[i] = simulation._move(action[i : i + 1])[0]
    return result
