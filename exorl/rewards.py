"""Rewards of any task from stored states, exactly and in bulk."""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from exorl import backends
from exorl.domains import DOMAINS
from exorl.tasks import Task
from exorl.tasks import task as find_task

Mode = Literal["exact", "exorl"]

Backend = Literal["closed_form", "mujoco", "dm_control"]

# Part of the key of every cached reward: raise it when a formula changes what it returns.
FORMULA_VERSION = 1


def reward(
    task: str,
    observation: ArrayLike,
    action: ArrayLike,
    physics: ArrayLike,
    mode: Mode = "exact",
    backend: Backend = "closed_form",
) -> np.ndarray:
    """Rewards `[...]` float32 of the states reached, each from the entries of its own row.

    In an ExoRL episode, row t holds the action and the state it led to, and so what it earned.

    Args:
        task: Name of the task.
        observation: `[..., O]`, read by the closed form of jaco, whose hand is in them.
        action: `[..., A]` in [-1, 1].
        physics: `[..., P]` simulator states, float64 for exact results.
        mode: `exact` is what the environment pays. `exorl` is what the relabelling of the
            published ExoRL code computes: it loses the actions, so that the force on cartpole and
            on the maze's ball costs nothing (up to 0.2 a step too much).
        backend: `closed_form` needs no simulator. `mujoco` lets MuJoCo place the bodies, and
            `dm_control` asks its task for every single state: the same, slower, to check against.

    Raises:
        TaskError: There is no such task.
        ValueError: The shapes, the mode or the back-end are not as above.
    """
    spec = find_task(task)
    observation = np.asarray(observation)
    action, physics = np.asarray(action, np.float64), np.asarray(physics, np.float64)
    _check_shapes(spec, observation, action, physics)
    if mode not in ("exact", "exorl"):
        raise ValueError(f"mode is {mode!r}, expected 'exact' or 'exorl'")
    domain = DOMAINS[spec.domain]
    if backend == "dm_control":
        paid = backends.ask_dm_control(spec, physics, action if mode == "exact" else None)
        return paid.astype(np.float32)
    if backend == "closed_form":
        state = domain.ClosedForm(physics, observation)
    elif backend == "mujoco":
        state = backends.measure(spec, physics)
    else:
        raise ValueError(
            f"backend is {backend!r}, expected 'closed_form', 'mujoco' or 'dm_control'"
        )
    control = action if mode == "exact" else np.zeros_like(action)
    return domain.reward(spec.goal, state, control).astype(np.float32)


def _check_shapes(
    task: Task, observation: np.ndarray, action: np.ndarray, physics: np.ndarray
) -> None:
    for field, array, dim in (
        ("observation", observation, task.observation_dim),
        ("action", action, task.action_dim),
        ("physics", physics, task.physics_dim),
    ):
        expected = (*physics.shape[:-1], dim)
        if array.shape != expected:
            raise ValueError(f"{task.name}: {field} has shape {array.shape}, expected {expected}")
