"""The tasks of ExoRL: their names, sizes and the returns that scores are measured against."""

import difflib
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


class TaskError(ValueError):
    """A task or domain that does not exist."""


@dataclass(frozen=True)
class Task:
    """One task of one domain, every episode a fixed number of steps long.

    Attributes:
        name: Domain and goal, `cheetah_run`.
        domain: The body and its physics, shared by the tasks of a dataset, `cheetah`.
        observation_dim: O, length of the flat float32 observation, in dm_control's order.
        action_dim: A, length of the action, each entry in [-1, 1].
        physics_dim: P, length of the float64 simulator state (qpos, qvel, act).
        reference_return: Raw return that counts as 100: the expert of URLB
            (url_benchmark, issue 1) where there is one, else the largest possible.
        random_return: Raw return that counts as 0: mean over 100 uniformly random episodes,
            measured by `scripts/measure_random.py` (95 % within 12 for cartpole, 3 elsewhere).
        episode_length: T, steps until the time limit, the only way an episode ends.
    """

    name: str
    domain: str
    observation_dim: int
    action_dim: int
    physics_dim: int
    reference_return: float
    random_return: float
    episode_length: int = 1000

    @property
    def goal(self) -> str:
        """The name within the domain, `run` of `cheetah_run`."""
        return self.name.removeprefix(f"{self.domain}_")


_TASKS = (
    #    name                   domain     O   A  P   reference random
    Task("cartpole_balance", "cartpole", 5, 1, 4, 1000, 364.0),
    Task("cartpole_balance_sparse", "cartpole", 5, 1, 4, 1000, 49.1),
    Task("cartpole_swingup", "cartpole", 5, 1, 4, 1000, 30.2),
    Task("cartpole_swingup_sparse", "cartpole", 5, 1, 4, 1000, 0.0),
    Task("cheetah_run", "cheetah", 17, 6, 18, 1000, 4.0),
    Task("cheetah_run_backward", "cheetah", 17, 6, 18, 1000, 19.6),
    Task("cheetah_walk", "cheetah", 17, 6, 18, 1000, 20.2),
    Task("cheetah_walk_backward", "cheetah", 17, 6, 18, 1000, 98.2),
    Task("cheetah_flip", "cheetah", 17, 6, 18, 1000, 151.2),
    Task("cheetah_flip_backward", "cheetah", 17, 6, 18, 1000, 146.0),
    Task("jaco_reach_top_left", "jaco", 42, 9, 18, 191, 0.0, episode_length=250),
    Task("jaco_reach_top_right", "jaco", 42, 9, 18, 223, 0.0, episode_length=250),
    Task("jaco_reach_bottom_left", "jaco", 42, 9, 18, 193, 0.0, episode_length=250),
    Task("jaco_reach_bottom_right", "jaco", 42, 9, 18, 203, 0.0, episode_length=250),
    Task("point_mass_maze_reach_top_left", "point_mass_maze", 4, 2, 4, 1000, 0.0),
    Task("point_mass_maze_reach_top_right", "point_mass_maze", 4, 2, 4, 1000, 0.0),
    Task("point_mass_maze_reach_bottom_left", "point_mass_maze", 4, 2, 4, 1000, 0.0),
    Task("point_mass_maze_reach_bottom_right", "point_mass_maze", 4, 2, 4, 1000, 0.0),
    Task("quadruped_stand", "quadruped", 78, 12, 57, 920, 0.0),
    Task("quadruped_walk", "quadruped", 78, 12, 57, 866, 0.0),
    Task("quadruped_run", "quadruped", 78, 12, 57, 888, 0.0),
    Task("quadruped_jump", "quadruped", 78, 12, 57, 888, 0.0),
    Task("walker_stand", "walker", 24, 6, 18, 984, 130.8),
    Task("walker_walk", "walker", 24, 6, 18, 971, 32.2),
    Task("walker_run", "walker", 24, 6, 18, 796, 23.1),
    Task("walker_flip", "walker", 24, 6, 18, 799, 50.3),
)

TASKS: dict[str, Task] = {task.name: task for task in _TASKS}

HIDDEN_GROUPS: dict[str, tuple[str, ...]] = {
    "cheetah_run_or_run_backward": ("cheetah_run", "cheetah_run_backward"),
    "cheetah_walk_or_walk_backward": ("cheetah_walk", "cheetah_walk_backward"),
    "cheetah_flip_or_flip_backward": ("cheetah_flip", "cheetah_flip_backward"),
    "jaco_reach": tuple(task.name for task in _TASKS if task.domain == "jaco"),
    "point_mass_maze_reach": tuple(t.name for t in _TASKS if t.domain == "point_mass_maze"),
}
"""Tasks of one domain that conflict: which of them is meant must be read from the context."""


def task(name: str) -> Task:
    """The task called `name`; `TaskError` lists the known names and the closest of them."""
    if name not in TASKS:
        raise TaskError(_unknown("task", name, TASKS))
    return TASKS[name]


def domain_tasks(domain: str) -> tuple[Task, ...]:
    """All tasks of a domain, at least one; `TaskError` if there is no such domain."""
    found = tuple(task for task in TASKS.values() if task.domain == domain)
    if not found:
        raise TaskError(_unknown("domain", domain, {task.domain: None for task in TASKS.values()}))
    return found


def normalized(name: str, episode_return: ArrayLike) -> np.ndarray:
    """Scores of raw returns, any shape: 0 is a random policy, 100 the reference."""
    bounds = task(name)
    span = bounds.reference_return - bounds.random_return
    return 100 * (np.asarray(episode_return, np.float64) - bounds.random_return) / span


def _unknown(kind: str, name: str, known: dict) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
    return f"unknown {kind} {name!r}: did you mean {close!r}? Known: {', '.join(known)}"
