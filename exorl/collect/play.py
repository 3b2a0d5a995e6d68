"""Plays episodes side by side and keeps them as ExoRL does."""

from collections.abc import Callable, Sequence

import numpy as np

from exorl.episodes import Episode
from exorl.simulation import Simulation

Policy = Callable[[int, np.ndarray], np.ndarray]
"""`(t, observation [B, O] float32) -> action [B, A] float32` in [-1, 1], t = 0 … T - 1."""


def generators(seed: int, indices: Sequence[int]) -> list[np.random.Generator]:
    """One source of randomness for each episode, a function of the seed and its index alone."""
    return [np.random.default_rng((seed, index)) for index in indices]


def play(simulation: Simulation, starts: Sequence[int], policy: Policy) -> list[Episode]:
    """B whole episodes, started from the seeds `starts` (B of them, each below 2**32)."""
    task, size = simulation.task, simulation.size
    rows = task.episode_length + 1
    observation = np.zeros((size, rows, task.observation_dim), np.float32)
    action = np.zeros((size, rows, task.action_dim), np.float32)
    reward = np.zeros((size, rows, 1), np.float32)
    physics = np.zeros((size, rows, task.physics_dim), np.float64)
    step = simulation.reset(starts)
    observation[:, 0], physics[:, 0] = step.observation, step.physics
    for t in range(1, rows):
        action[:, t] = policy(t - 1, step.observation)
        step = simulation.step(action[:, t])
        observation[:, t], physics[:, t] = step.observation, step.physics
        reward[:, t, 0] = step.reward
    discount = np.ones((rows, 1), np.float32)  # the time limit is not a failure
    return [
        Episode(observation[i], action[i], reward[i], discount, physics[i]) for i in range(size)
    ]
