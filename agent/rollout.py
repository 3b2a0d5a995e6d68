"""Rollouts in dm_control: several episodes in one context, many environments in lock step."""

from typing import NamedTuple

import numpy as np

from agent.policy import Policy
from data.batches import Batch
from data.normalize import Normalizer
from data.packing import steps_in, token_reward
from exorl.simulation import Simulation
from exorl.tasks import task


class Before(NamedTuple):
    """The step before: what a `step` token tells of it.

    Attributes:
        action: ``[B, c·A]``.
        reward: ``[B, 1]``, scaled.
        completion: ``[B, 1]``.
    """

    action: np.ndarray
    reward: np.ndarray
    completion: np.ndarray

    @classmethod
    def nothing(cls, batch: int, actions: int) -> "Before":
        """What precedes the first step of all."""
        zeros = np.zeros((batch, 1), np.float32)
        return cls(np.zeros((batch, actions), np.float32), zeros, zeros)

    @classmethod
    def last_of(cls, context: Batch) -> "Before":
        """What precedes the first step after a packed context."""
        return cls(context.action[:, -1], context.reward[:, -1], context.completion[:, -1])


def rollout(
    policy: Policy,
    task_name: str,
    seeds: np.ndarray,
    *,
    normalizer: Normalizer,
    chunk: int,
    scale: float,
    target: float = 1.0,
    context: Batch | None = None,
    cross_episode: bool = True,
) -> np.ndarray:
    """Run consecutive episodes that share one context.

    Every episode starts with the return-to-go ``target`` and lowers it by the true rewards over
    ``scale``; the last action, reward and completion flag of an episode enter the first step of the
    next. Units are those of `data.batches.Batch`.

    Args:
        policy: acts in B environments.
        task_name: whose rewards are earned.
        seeds: ``[B, episodes]`` int, the initial state of every episode.
        normalizer: of observations.
        chunk: environment steps run open loop between two looks at the observation.
        scale: raw return that the policy knows as 1.
        target: return-to-go at the start of an episode, in units of ``scale``.
        context: packed chains ``[B, S, …]`` that the policy has seen already.
        cross_episode: False tells no episode of the one before it.

    Returns:
        Raw returns ``[B, episodes]`` float64.
    """
    batch, episodes = seeds.shape
    info = task(task_name)
    steps = steps_in(info.episode_length, chunk)
    simulation = Simulation(task_name, batch)
    actions = chunk * info.action_dim
    before = Before.last_of(context) if context else Before.nothing(batch, actions)
    first = int(context.trajectory.max()) + 1 if context else 0
    returns = np.zeros((batch, episodes))
    for episode in range(episodes):
        observation = simulation.reset([int(seed) for seed in seeds[:, episode]]).observation
        for step in range(steps):
            if step == 0 and not cross_episode:
                before = Before.nothing(batch, actions)
            to_go = (target - returns[:, episode, None] / scale).astype(np.float32)
            seen = _step(to_go, normalizer(observation), before, step, first + episode)
            chosen = policy.act(seen).reshape(batch, chunk, -1).copy()
            chosen[:, info.episode_length - step * chunk :] = 0  # beyond the time limit
            earned = np.zeros(batch)
            for now in range(min(chunk, info.episode_length - step * chunk)):
                observation, rewards, _ = simulation.step(chosen[:, now])
                earned += rewards
            returns[:, episode] += earned
            reached = (step == steps - 1) & (returns[:, episode] >= target * scale)
            before = Before(
                action=chosen.reshape(batch, -1),
                reward=token_reward(earned, steps, scale).astype(np.float32)[:, None],
                completion=reached.astype(np.float32)[:, None],
            )
            policy.record(
                seen._replace(**{name: part[:, None] for name, part in before._asdict().items()})
            )
    return returns


def _step(
    to_go: np.ndarray, observation: np.ndarray, before: Before, step: int, trajectory: int
) -> Batch:
    """A batch of one step whose action is not known yet."""
    batch = len(to_go)

    def every(value: int) -> np.ndarray:
        return np.full((batch, 1), value, np.int32)

    unknown = Before.nothing(batch, before.action.shape[1])
    return Batch(
        return_to_go=to_go[:, None],
        observation=observation[:, None],
        **{name: part[:, None] for name, part in unknown._asdict().items()},
        **{f"previous_{name}": part[:, None] for name, part in before._asdict().items()},
        timestep=every(step),
        trajectory=every(trajectory),
        order=every(0),
        chain=every(0),
        loss_mask=np.zeros((batch, 1), np.float32),
    )
