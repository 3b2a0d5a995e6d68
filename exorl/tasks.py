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
        episode_length: T, steps until the time limit, the only way an episode ends.
        observation_dim: O, length of the flat float32 observation, in dm_control's order.
        action_dim: A, length of the action, each entry in [-1, 1].
        physics_dim: P, length of the float64 simulator state (qpos, qvel, act).
        reference_return: Raw return that counts as 100: the expert of URLB
            (url_benchmark, issue 1) where there is one, else the largest possible.
        random_return: Raw return that counts as 0: the mean over uniformly random episodes, 400 of
            jaco, maze and quadruped, whose starts differ most, 100 of the others.
        random_error: Half the width of its 95 % interval. `scripts/measure_random.py` measures
            both.
    """

    name: str
    domain: str
    episode_length: int
    observation_dim: int
    action_dim: int
    physics_dim: int
    reference_return: float
    random_return: float
    random_error: float

    @property
    def goal(self) -> str:
        """The name within the domain, `run` of `cheetah_run`."""
        return self.name.removeprefix(f"{self.domain}_")


_TASKS = (
    #    name, domain, T, O, A, P, reference return, random return and error
    Task("cartpole_balance", "cartpole", 1000, 5, 1, 4, 1000, 364.0, 11.7),
    Task("cartpole_balance_sparse", "cartpole", 1000, 5, 1, 4, 1000, 49.1, 5.3),
    Task("cartpole_swingup", "cartpole", 1000, 5, 1, 4, 1000, 30.2, 5.0),
    Task("cartpole_swingup_sparse", "cartpole", 1000, 5, 1, 4, 1000, 0.0, 0.0),
    Task("cheetah_run", "cheetah", 1000, 17, 6, 18, 1000, 4.0, 0.2),
    Task("cheetah_run_backward", "cheetah", 1000, 17, 6, 18, 1000, 19.6, 0.4),
    Task("cheetah_walk", "cheetah", 1000, 17, 6, 18, 1000, 20.2, 1.2),
    Task("cheetah_walk_backward", "cheetah", 1000, 17, 6, 18, 1000, 98.2, 2.2),
    Task("cheetah_flip", "cheetah", 1000, 17, 6, 18, 1000, 151.2, 2.1),
    Task("cheetah_flip_backward", "cheetah", 1000, 17, 6, 18, 1000, 146.0, 2.1),
    Task("jaco_reach_top_left", "jaco", 250, 42, 9, 18, 191, 13.8, 3.2),
    Task("jaco_reach_top_right", "jaco", 250, 42, 9, 18, 223, 13.9, 3.3),
    Task("jaco_reach_bottom_left", "jaco", 250, 42, 9, 18, 193, 15.5, 3.7),
    Task("jaco_reach_bottom_right", "jaco", 250, 42, 9, 18, 203, 11.9, 3.0),
    Task("point_mass_maze_reach_top_left", "point_mass_maze", 1000, 4, 2, 4, 1000, 23.6, 8.9),
    Task("point_mass_maze_reach_top_right", "point_mass_maze", 1000, 4, 2, 4, 1000, 0.0, 0.0),
    Task("point_mass_maze_reach_bottom_left", "point_mass_maze", 1000, 4, 2, 4, 1000, 0.0, 0.0),
    Task("point_mass_maze_reach_bottom_right", "point_mass_maze", 1000, 4, 2, 4, 1000, 0.0, 0.0),
    Task("quadruped_stand", "quadruped", 1000, 78, 12, 57, 920, 222.8, 39.3),
    Task("quadruped_walk", "quadruped", 1000, 78, 12, 57, 866, 111.4, 19.7),
    Task("quadruped_run", "quadruped", 1000, 78, 12, 57, 888, 111.4, 19.6),
    Task("quadruped_jump", "quadruped", 1000, 78, 12, 57, 888, 166.3, 29.2),
    Task("walker_stand", "walker", 1000, 24, 6, 18, 984, 130.8, 2.5),
    Task("walker_walk", "walker", 1000, 24, 6, 18, 971, 32.2, 0.7),
    Task("walker_run", "walker", 1000, 24, 6, 18, 796, 23.1, 0.4),
    Task("walker_flip", "walker", 1000, 24, 6, 18, 799, 50.3, 0.9),
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
