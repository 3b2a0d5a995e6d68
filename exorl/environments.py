"""ExoRL's tasks as gymnasium environments: flat observations in dm_control's own order.

Importing this, or `exorl`, registers them: `gymnasium.make("exoring/walker_walk-v0")`.
"""

from typing import Any

import gymnasium
import numpy as np

from exorl import suite
from exorl.tasks import TASKS
from exorl.tasks import task as find_task


class Environment(gymnasium.Env[np.ndarray, np.ndarray]):
    """One dm_control task. Observations and actions are as in ExoRL's data.

    Observations are flat float32 in the order dm_control returns them (sorting the keys, as
    generic adapters do, would permute walker's against the datasets). Actions are float32 in
    [-1, 1], clipped to it and scaled to what the motors take. Episodes last
    `task.episode_length` steps and are then truncated, never terminated. `info["physics"]` is
    the float64 simulator state from which rewards can be recomputed.
    """

    def __init__(self, task: str, seed: int = 0):
        """Builds the environment; see `make`."""
        self.task = find_task(task)
        self._environment = suite.load(task, seed)
        motors = self._environment.action_spec()
        self._scale = suite.scaling(motors.minimum, motors.maximum)
        self._over = True
        self.observation_space = gymnasium.spaces.Box(
            -np.inf, np.inf, (self.task.observation_dim,), np.float32
        )
        self.action_space = gymnasium.spaces.Box(-1, 1, (self.task.action_dim,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode; the same seed starts bitwise the same one.

        Without a seed, episodes follow each other as in dm_control's environment.
        """
        super().reset(seed=seed, options=options)
        if seed is not None:
            suite.reseed(self._environment, seed)
        self._over = False
        return self._flat(self._environment.reset().observation), self._info()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One control step.

        Raises:
            RuntimeError: The episode is over, or none has begun.
            ValueError: The action has another shape or is not finite.
        """
        if self._over:
            raise RuntimeError("no episode is running: call reset() first")
        action = np.asarray(action, np.float32)
        if action.shape != self.action_space.shape:
            raise ValueError(f"action has shape {action.shape}, expected {self.action_space.shape}")
        result = self._environment.step(self._scale(action))
        self._over = result.last()
        observation = self._flat(result.observation)
        return observation, float(result.reward), False, self._over, self._info()

    def _flat(self, observation: dict[str, Any]) -> np.ndarray:
        flat, start = np.empty(self.task.observation_dim, np.float32), 0
        for part in observation.values():
            end = start + part.size
            flat[start:end] = part if part.ndim < 2 else part.ravel()
            start = end
        return flat

    def _info(self) -> dict[str, Any]:
        return {"physics": self._environment.physics.get_state()}


def make(task: str, seed: int = 0) -> Environment:
    """The environment of a task, whose first episode is that of `reset(seed=seed)`.

    Raises:
        TaskError: There is no such task.
        VersionError: dm_control can't read this MuJoCo's models.
    """
    return Environment(task, seed)


for _name in TASKS:
    gymnasium.register(f"exoring/{_name}-v0", f"{__name__}:make", kwargs={"task": _name})
