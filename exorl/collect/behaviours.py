"""Random behaviours: what an episode does that nobody trained."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

HIDDEN = 32  # units of a random network


@dataclass(frozen=True)
class Behaviour:
    """One episode's actions: a tape, plus a network's reaction to what is observed."""

    tape: np.ndarray  # [T, A]
    inner: np.ndarray  # [HIDDEN, O + 1], the last column multiplies 1
    outer: np.ndarray  # [A, HIDDEN]


Maker = Callable[[np.random.Generator, tuple[int, int, int], float], Behaviour]
"""How `uniform`, `rhythm` and `network` are called."""


def uniform(rng: np.random.Generator, shape: tuple[int, int, int], timestep: float) -> Behaviour:
    """Actions uniform in [-1, 1], as ExoRL's `random`.

    Args:
        rng: Where everything random comes from.
        shape: Steps T, observation size O and action size A.
        timestep: Seconds from one action to the next; not needed here.
    """
    steps, observations, actions = shape
    return Behaviour(rng.uniform(-1, 1, (steps, actions)), *_no_network(observations, actions))


def rhythm(rng: np.random.Generator, shape: tuple[int, int, int], timestep: float) -> Behaviour:
    """All joints swing at one frequency, each with its own phase, amplitude and centre.

    The frequency is log-uniform in 0.5–6 Hz, the gait range of the suite's bodies; arguments as
    for `uniform`.
    """
    steps, observations, actions = shape
    frequency = np.exp(rng.uniform(np.log(0.5), np.log(6)))
    phase = rng.uniform(0, 2 * np.pi, actions)
    amplitude = rng.uniform(0, 1, actions)
    centre = rng.uniform(-0.3, 0.3, actions)
    time = timestep * np.arange(steps)[:, None]
    swing = centre + amplitude * np.sin(2 * np.pi * frequency * time + phase)
    return Behaviour(swing + _jitter(rng, steps, actions), *_no_network(observations, actions))


def network(rng: np.random.Generator, shape: tuple[int, int, int], timestep: float) -> Behaviour:
    """A random tanh network acts on the observation; its gain is log-uniform in 0.3–4.

    Arguments as for `uniform`.
    """
    steps, observations, actions = shape
    gain = np.exp(rng.uniform(np.log(0.3), np.log(4)))
    inner = rng.normal(0, gain / np.sqrt(observations), (HIDDEN, observations + 1))
    outer = rng.normal(0, gain / np.sqrt(HIDDEN), (actions, HIDDEN))
    return Behaviour(_jitter(rng, steps, actions), inner, outer)


def act(behaviours: list[Behaviour]) -> Callable[[int, np.ndarray], np.ndarray]:
    """The policy `(t, observation [B, O]) -> action [B, A]` of B episodes side by side.

    An episode's numbers do not depend on the others: every product is of one episode alone.
    """
    tape, inner, outer = (
        np.stack([getattr(behaviour, name) for behaviour in behaviours])
        for name in ("tape", "inner", "outer")
    )

    def policy(t: int, observation: np.ndarray) -> np.ndarray:
        column = np.concatenate([observation, np.ones_like(observation[:, :1])], axis=1)[..., None]
        reaction = np.tanh(outer @ np.tanh(inner @ column.astype(np.float64)))[..., 0]
        return np.clip(tape[:, t] + reaction, -1, 1).astype(np.float32)

    return policy


def _jitter(rng: np.random.Generator, steps: int, actions: int) -> np.ndarray:
    return rng.normal(0, 0.1, (steps, actions))


def _no_network(observations: int, actions: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((HIDDEN, observations + 1)), np.zeros((actions, HIDDEN))
