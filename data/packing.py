"""Packing: a chain as arrays over steps, and what tokens the model makes of each step.

A *step* is ``chunk`` environment steps: the observation and return-to-go at its start, its
actions side by side, its rewards summed. The arrays hold no tokens: the model embeds and
interleaves on the device, so that no token-length array ever exists on the host.
"""

from typing import Any, Literal, TypeVar

import numpy as np

from data.batches import Batch
from data.hindsight import Chain, Trajectory, returns_to_go

Count = TypeVar("Count", int, np.ndarray)
Packing = Literal["step", "rsar", "rsa"]

SLOTS: dict[str, tuple[str, ...]] = {
    # One token: return-to-go, observation, previous reward (and action); predicts the action.
    "step": ("step",),
    # Return-to-go, state, action, reward: Ring Attention's four tokens a step (arXiv 2310.01889).
    "rsar": ("return_to_go", "observation", "action", "reward"),
    # Decision Transformer's three (arXiv 2106.01345).
    "rsa": ("return_to_go", "observation", "action"),
}
"""Tokens of one step in causal order, by packing."""

ACTING_SLOT: dict[str, int] = {"step": 0, "rsar": 1, "rsa": 1}
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


def pack(chain: Chain, *, chunk: int = 1) -> Batch:
    """Lay a chain out as one sequence of steps, without a batch axis.

    ``previous_action`` and ``previous_reward`` cross trajectory borders: the first step of a
    trajectory carries the last action and reward of the one before it (zeros for the first),
    so that a `step` token at t = 0 tells how the last trajectory ended. Only complete steps of
    the last trajectory enter the loss.

    Args:
        chain: sorted, relabelled trajectories.
        chunk: environment steps in one step.

    Returns:
        A `Batch` whose arrays lack the leading B.
    """
    parts = [
        _steps(trajectory, index, chain, chunk)
        for index, trajectory in enumerate(chain.trajectories)
    ]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    last = joined["trajectory"] == len(chain.trajectories) - 1
    return Batch(
        return_to_go=joined["return_to_go"],
        observation=joined["observation"],
        action=joined["action"],
        reward=joined["reward"],
        previous_action=_shifted(joined["action"]),
        previous_reward=_shifted(joined["reward"]),
        timestep=joined["timestep"],
        trajectory=joined["trajectory"],
        order=np.arange(len(last), dtype=np.int32),
        loss_mask=(last & joined["complete"]).astype(np.float32),
    )


def _steps(trajectory: Trajectory, index: int, chain: Chain, chunk: int) -> dict[str, np.ndarray]:
    length, count = len(trajectory), steps_in(len(trajectory), chunk)
    to_go = returns_to_go(trajectory.reward, chain.target) / np.float32(chain.scale)
    action, reward = trajectory.action, trajectory.reward
    if missing := count * chunk - length:
        action = np.pad(action, ((0, missing), (0, 0)))
        reward = np.pad(reward, (0, missing))
    action, reward = action.reshape(count, -1), reward.reshape(count, chunk)
    summed = token_reward(reward.sum(axis=1, dtype=np.float64), count, chain.scale)
    step = np.arange(count, dtype=np.int32)
    return {
        "return_to_go": to_go[::chunk, None],
        "observation": trajectory.observation[::chunk],
        "action": action,
        "reward": summed.astype(np.float32)[:, None],
        "timestep": step,
        "trajectory": np.full(count, index, np.int32),
        "complete": (step + 1) * chunk <= length,
    }


def _shifted(values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(values[:1]), values[:-1]])
