"""Rollouts in dm_control: several episodes in one context, many environments in lock step."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from agent import networks
from agent.checkpoint import Agent
from agent.history import Alone, Before, History, Start
from agent.policy import Policy
from agent.simulation import Episodes
from data.batches import Batch
from data.hindsight import Trajectory
from data.packing import steps_in, token_reward


class Rolled(NamedTuple):
    """What B environments did in consecutive episodes.

    Attributes:
        returns: raw ``[B, episodes]`` float64.
        targets: ``[B, episodes]``, return-to-go at the start of each, in units.
        stale: ``[B, episodes]`` bool, whether an earlier return had beaten the target.
        evicted: ``[episodes]`` bool, whether trajectories had been evicted from the cache.
        trajectories: by episode and environment, rewards in units.
    """

    returns: np.ndarray
    targets: np.ndarray
    stale: np.ndarray
    evicted: np.ndarray
    trajectories: list[list[Trajectory]]


def rollout(
    agent: Agent,
    policy: Policy,
    simulation: Episodes,
    seeds: np.ndarray,
    *,
    scale: float,
    history: History | Alone,
    progress: Callable[[int], object] = lambda steps: None,
) -> Rolled:
    """Run consecutive episodes that share one context.

    Every episode starts with the target as its return-to-go and lowers it by the true rewards; the
    last action, reward and completion flag of an episode enter the first step of the next. Returns
    in units are those of `data.batches.Batch`: 1 is ``scale``.

    Args:
        agent: whose normaliser and settings they are.
        policy: acts in B environments.
        simulation: B episodes of the task whose rewards are earned.
        seeds: ``[B, episodes]`` int, the initial state of every episode.
        scale: raw return that the policy knows as 1.
        history: of the sequence: tells how each episode begins.
        progress: told the environment steps of each episode as they are done.
    """
    before = Before.nothing(len(seeds), networks.dimensions(agent.config).action)
    starts, episodes = [], []
    for drawn in seeds.T:
        start = history.begin()
        if start.before is not None:
            before = start.before
        done, before = _play(agent, policy, simulation, drawn, scale, start, before, progress)
        history.end(done)
        starts.append(start)
        episodes.append(done)
    return Rolled(
        returns=scale * np.array([[each.episode_return for each in done] for done in episodes]).T,
        targets=np.array([start.targets for start in starts]).T,
        stale=np.array([start.stale for start in starts]).T,
        evicted=np.array([start.evicted for start in starts]),
        trajectories=episodes,
    )


def _play(
    agent: Agent,
    policy: Policy,
    simulation: Episodes,
    seeds: np.ndarray,
    scale: float,
    start: Start,
    before: Before,
    progress: Callable[[int], object],
) -> tuple[list[Trajectory], Before]:
    """One episode of every environment, and what its last step was."""
    model, length = agent.config.model, simulation.task.episode_length
    chunk, steps = model.chunk, steps_in(length, model.chunk)
    if not model.cross_episode:
        before = Before.nothing(len(seeds), before.action.shape[1])
    observation = simulation.reset([int(seed) for seed in seeds]).observation
    observations, actions, rewards = [], [], []
    earned = np.zeros(len(seeds))
    for step in range(steps):
        to_go = (start.targets - earned / scale).astype(np.float32)[:, None]
        seen = _step(to_go, agent.normalizer(observation), before, step, start.index)
        chosen = policy.act(seen).reshape(len(seeds), chunk, -1).copy()
        chosen[:, length - step * chunk :] = 0  # beyond the time limit
        now = range(min(chunk, length - step * chunk))
        for action in chosen.swapaxes(0, 1)[: len(now)]:
            observations.append(observation)
            observation, reward, _ = simulation.step(action)
            actions.append(action)
            rewards.append(reward.astype(np.float64))
        summed = np.sum(rewards[-len(now) :], axis=0)
        earned += summed
        reached = (step == steps - 1) & (earned >= start.targets * scale)
        before = Before(
            action=chosen.reshape(len(seeds), -1),
            reward=token_reward(summed, steps, scale).astype(np.float32)[:, None],
            completion=reached.astype(np.float32)[:, None],
        )
        policy.record(
            seen._replace(**{name: part[:, None] for name, part in before._asdict().items()})
        )
        progress(len(now) * len(seeds))
    whole = (np.stack(each, axis=1) for each in (observations, actions, rewards))
    return [
        Trajectory(observation, action, reward / scale)
        for observation, action, reward in zip(*whole, strict=True)
    ], before


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
