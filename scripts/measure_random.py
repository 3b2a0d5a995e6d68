"""Measures the return of a uniformly random policy, the zero of every normalised score.

Example:
    python -m scripts.measure_random --tasks cheetah_run walker_walk

The numbers belong into the table of `exorl/tasks.py`.
"""

import numpy as np
import tyro

from exorl.simulation import Simulation
from exorl.tasks import TASKS
from scripts import command


def random_returns(task: str, episodes: int) -> np.ndarray:
    """Raw returns `[episodes]` of uniformly random actions, seeded 0 to episodes - 1."""
    simulation = Simulation(task, episodes)
    simulation.reset(range(episodes))
    rng = np.random.default_rng(0)
    total = np.zeros(episodes)
    for _ in range(simulation.task.episode_length):
        action = rng.uniform(-1, 1, (episodes, simulation.task.action_dim))
        total += simulation.step(action).reward
    return total


def main(tasks: tuple[str, ...] = tuple(TASKS), episodes: int = 100) -> None:
    """Prints mean raw return and 95 % interval (normal approximation) of random episodes.

    Example: python -m scripts.measure_random --tasks cheetah_run walker_walk

    Args:
        tasks: Names of the tasks to measure.
        episodes: Episodes a task, at least 2.

    Raises:
        ValueError: Fewer, which have no interval.
    """
    if episodes < 2:
        raise ValueError(f"episodes is {episodes}, expected at least 2: one has no interval")
    for task in tasks:
        returns = random_returns(task, episodes)
        half_width = 1.96 * returns.std(ddof=1) / np.sqrt(episodes)
        print(f"{task:24} {returns.mean():8.2f} ± {half_width:.2f}  ({episodes} episodes)")


if __name__ == "__main__":
    command.run(lambda: tyro.cli(main))
