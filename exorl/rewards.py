"""Rewards of any task from stored states, exactly and in bulk, without a simulator."""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from exorl.domains import cartpole, cheetah, walker
from exorl.tasks import task as find_task

DOMAINS = {"cartpole": cartpole, "cheetah": cheetah, "walker": walker}

Mode = Literal["exact", "exorl"]

# Part of the key of every cached reward: raise it when a formula changes what it returns.
FORMULA_VERSION = 1


def reward(
    task: str,
    observation: ArrayLike,
    action: ArrayLike,
    physics: ArrayLike,
    mode: Mode = "exact",
) -> np.ndarray:
    """Rewards `[...]` float32 of the states reached, each from the entries of its own row.

    In an ExoRL episode, row t holds the action and the state it led to, and so what it earned.

    Args:
        task: Name of the task.
        observation: `[..., O]`, read by domains whose state alone does not tell the reward.
        action: `[..., A]` in [-1, 1].
        physics: `[..., P]` simulator states, float64 for exact results.
        mode: `exact` is what the environment pays. `exorl` is what the relabelling of the
            published ExoRL code computes: it loses the actions, so that cartpole's force costs
            nothing (up to 0.2 a step too much).

    Raises:
        TaskError: There is no such task.
        ValueError: The shapes or the mode are not as above.
    """
    spec = find_task(task)
    observation = np.asarray(observation)
    action, physics = np.asarray(action, np.float64), np.asarray(physics, np.float64)
    for field, array, dim in (
        ("observation", observation, spec.observation_dim),
        ("action", action, spec.action_dim),
        ("physics", physics, spec.physics_dim),
    ):
        expected = (*physics.shape[:-1], dim)
        if array.shape != expected:
            raise ValueError(f"{task}: {field} has shape {array.shape}, expected {expected}")
    if mode not in ("exact", "exorl"):
        raise ValueError(f"mode is {mode!r}, expected 'exact' or 'exorl'")
    control = action if mode == "exact" else np.zeros_like(action)
    return DOMAINS[spec.domain].reward(spec.goal, physics, control).astype(np.float32)
