"""Packing: a chain as arrays over steps, and what tokens the model makes of each step.

A *step* is ``chunk`` environment steps: the observation and return-to-go at its start, its
actions side by side, its rewards summed. The arrays hold no tokens: the model embeds and
interleaves on the device, so that no token-length array ever exists on the host.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from data.batches import PADDING, Batch
from data.hindsight import Chain, Trajectory, returns_to_go

Count = TypeVar("Count", int, np.ndarray)
Packing = Literal["step", "rsar", "rsard", "rsa"]
LossOn = Literal["last", "all"]

SLOTS: dict[str, tuple[str, ...]] = {
    # One token: return-to-go, observation, previous reward (and action); predicts the action.
    "step": ("step",),
    # Return-to-go, state, action, reward: Ring Attention's four tokens a step (arXiv 2310.01889).
    "rsar": ("return_to_go", "observation", "action", "reward"),
    # The Agentic Transformer's five, with the completion flag (arXiv 2305.16554).
    "rsard": ("return_to_go", "observation", "action", "reward", "completion"),
    # Decision Transformer's three (arXiv 2106.01345).
    "rsa": ("return_to_go", "observation", "action"),
}
"""Tokens of one step in causal order, by packing."""

ACTING_SLOT: dict[str, int] = {"step": 0, "rsar": 1, "rsard": 1, "rsa": 1}
"""The slot whose output predicts the action, by packing."""


def steps_in(length: Count, chunk: int) -> Count:
    """Steps that ``length`` environment steps pack into; the last may be partial."""
    return -(-length // chunk)


def token_reward(earned: Any, steps: Any, scale: float) -> Any:
    """The reward of a step as a token holds it: a quarter where things go as well as can be.

    Against returns-to-go, which are 1 at best, the reward of one step would be a few thousandths,
    too faint an input to learn from, so it is multiplied by the steps of a trajectory. Only a
    quarter of that, or some agents find out a hidden task within their first episode.

    Args:
        earned: raw reward summed over the step.
        steps: steps in the trajectory.
        scale: raw return that counts as 1.
    """
    return earned * steps / (4 * scale)


def pack(
    chain: Chain,
    *,
    chunk: int = 1,
    loss_on: LossOn = "last",
    cross_episode: bool = True,
    indices: Sequence[int] | np.ndarray | None = None,
    row: int = 0,
    steps: np.ndarray | None = None,
) -> Batch:
    """Lay a chain out as one sequence of steps, without a batch axis.

    ``previous_*`` cross trajectory borders: the first step of a trajectory carries the last action,
    reward and completion flag of the one before it (zeros for the first), so that a `step` token
    at t = 0 tells how the last trajectory ended. A trajectory is complete when it ends with at
    least its target return. Only complete steps enter the loss.

    Args:
        chain: sorted, relabelled trajectories.
        chunk: environment steps in one step.
        loss_on: actions of the last trajectory, or of all.
        cross_episode: False lets no trajectory know of the one before it.
        indices: ``trajectory`` of each, ascending; None counts from 0.
        row: of the chain in its batch.
        steps: int ``[S]``, which steps of the chain, by default all; those beyond its end, or
            negative, are padding. Trajectories that none of them touches are not read.

    Returns:
        A `Batch` whose arrays lack the leading B.
    """
    counts = np.array([steps_in(len(each), chunk) for each in chain.trajectories])
    ends = np.cumsum(counts)
    steps = np.arange(ends[-1]) if steps is None else np.asarray(steps)
    padding = (steps < 0) | (steps >= ends[-1])
    at = np.where(padding, 0, steps)
    owner = np.searchsorted(ends, at, side="right")
    needed = np.zeros(len(ends), bool)
    needed[owner] = True
    # The step before may belong to the trajectory before.
    needed[np.maximum(owner[at == (ends - counts)[owner]] - 1, 0)] = True
    touched = np.flatnonzero(needed)
    parts = {i: _steps(chain, int(i), chunk) for i in touched}
    begin = (np.cumsum(counts[touched]) - counts[touched])[np.searchsorted(touched, owner)]
    here = begin + at - (ends - counts)[owner]
    joined = {name: np.concatenate([parts[i][name] for i in touched]) for name in _FIELDS}
    last = len(chain.trajectories) - 1
    masked_in = joined["whole"][here] & ((owner == last) | (loss_on == "all"))
    known = at > 0 if cross_episode else joined["timestep"][here] > 0
    index = owner if indices is None else np.asarray(indices)[owner]
    earlier = np.where(known, here - 1, 0)

    def now(name: str) -> np.ndarray:
        return _masked(joined[name][here], ~padding)

    def before(name: str) -> np.ndarray:
        return _masked(joined[name][earlier], known & ~padding)

    return Batch(
        return_to_go=now("return_to_go"),
        observation=now("observation"),
        action=now("action"),
        reward=now("reward"),
        completion=now("completion"),
        previous_action=before("action"),
        previous_reward=before("reward"),
        previous_completion=before("completion"),
        timestep=now("timestep"),
        trajectory=_masked(index.astype(np.int32), ~padding),
        order=np.where(padding, PADDING, steps).astype(np.int32),
        chain=np.where(padding, 0, row).astype(np.int32),
        loss_mask=(masked_in & ~padding).astype(np.float32),
    )


_FIELDS = ("return_to_go", "observation", "action", "reward", "completion", "timestep", "whole")


def _steps(chain: Chain, index: int, chunk: int) -> dict[str, np.ndarray]:
    """One trajectory's steps, ``[S, …]`` each; ``whole`` tells those of ``chunk`` actions."""
    trajectory: Trajectory = chain.trajectories[index]
    length, count = len(trajectory), steps_in(len(trajectory), chunk)
    target = chain.targets[index]
    to_go = returns_to_go(trajectory.reward, target) / np.float32(chain.scale)
    action, reward = trajectory.action, trajectory.reward
    if missing := count * chunk - length:
        action = np.pad(action, ((0, missing), (0, 0)))
        reward = np.pad(reward, (0, missing))
    action, reward = action.reshape(count, -1), reward.reshape(count, chunk)
    summed = token_reward(reward.sum(axis=1, dtype=np.float64), count, chain.scale)
    step = np.arange(count, dtype=np.int32)
    completion = np.zeros((count, 1), np.float32)
    completion[-1] = trajectory.episode_return >= target
    return {
        "return_to_go": to_go[::chunk, None],
        "observation": trajectory.observation[::chunk],
        "action": action,
        "reward": summed.astype(np.float32)[:, None],
        "completion": completion,
        "timestep": step,
        "whole": (step + 1) * chunk <= length,
    }


def _masked(values: np.ndarray, keep: np.ndarray) -> np.ndarray:
    return np.where(keep.reshape(-1, *[1] * (values.ndim - 1)), values, np.zeros_like(values))
