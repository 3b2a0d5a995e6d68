"""Rollouts in dm_control: several episodes in one context, many environments in lock step."""

from typing import NamedTuple

import numpy as np

from agent.policy import Policy
from data.batches import Batch
from data.normalize import Normalizer
from data.packing import steps_in, token_reward
from exorl.simulation import Simulation
from exorl.tasks import task


class Start(NamedTuple):
    """What precedes the first own episode.

    Attributes:
        trajectories: trajectories in the context.
        action: ``[B, c·A]``, the context's last action (zeros without one).
        reward: ``[B, 1]``, the context's last reward, scaled.
    """

    trajectories: int
    action: np.ndarray
    reward: np.ndarray

    @classmethod
    def after(cls, context: Batch | None, batch: int, actions: int) -> "Start":
        """The start that follows a packed context, or an empty one."""
        if context is None:
            return cls(0, np.zeros((batch, actions), np.float32), np.zeros((batch, 1), np.float32))
        trajectories = int(context.trajectory.max()) + 1
        return cls(trajectories, context.action[:, -1], context.reward[:, -1])


def rollout(
    policy: Policy,
    task_name: str,
    seeds: np.ndarray,
    *,
    normalizer: Normalizer,
    chunk: int,
    scale: float,
    target: float = 1.0,
    start: Start | None = None,
) -> np.ndarray:
    """Run consecutive episodes that share one context.

    Every episode starts with the return-to-go ``target`` and lowers it by the true rewards over
    ``scale``; the last action and reward of an episode enter the first step of the next. Units
    are those of `data.batches.Batch`.

    Args:
        policy: acts in B environments.
        task_name: whose rewards are earned.
        seeds: ``[B, episodes]`` int, the initial state of every episode.
        normalizer: of observations.
        chunk: environment steps run open loop between two looks at the observation.
        scale: raw return that the policy knows as 1.
        target: return-to-go at the start of an episode, in units of ``scale``.
        start: what went before.

    Returns:
        Raw returns ``[B, episodes]`` float64.
    """
    batch, episodes = seeds.shape
    info = task(task_name)
    steps = steps_in(info.episode_length, chunk)
    simulation = Simulation(task_name, batch)
    start = start or Start.after(None, batch, chunk * info.action_dim)
    action, reward = start.action, start.reward
    returns = np.zeros((batch, episodes))
    for episode in range(episodes):
        observation = simulation.reset([int(seed) for seed in seeds[:, episode]]).observation
        for step in range(steps):
            to_go = target - returns[:, episode, None] / scale
            seen = Batch(
                return_to_go=to_go[:, None].astype(np.float32),
                observation=normalizer(observation)[:, None],
                action=np.zeros_like(action)[:, None],
                reward=np.zeros_like(reward)[:, None],
                previous_action=action[:, None],
                previous_reward=reward[:, None],
                timestep=np.full((batch, 1), step, np.int32),
                trajectory=np.full((batch, 1), start.trajectories + episode, np.int32),
                order=np.zeros((batch, 1), np.int32),
                loss_mask=np.zeros((batch, 1), np.float32),
            )
            actions = policy.act(seen).reshape(batch, chunk, -1).copy()
            actions[:, info.episode_length - step * chunk :] = 0  # beyond the time limit
            earned = np.zeros(batch)
            for now in range(min(chunk, info.episode_length - step * chunk)):
                observation, rewards, _ = simulation.step(actions[:, now])
                earned += rewards
            action = actions.reshape(batch, -1)
            returns[:, episode] += earned
            reward = token_reward(earned, steps, scale).astype(np.float32)[:, None]
            policy.record(seen._replace(action=action[:, None], reward=reward[:, None]))
    return returns
