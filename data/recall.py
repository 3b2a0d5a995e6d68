"""Chains in which the last trajectory asks for what the others showed: recall, and nothing else.

The counterpart of long-range line retrieval (LongChat, lmsys.org/blog/2023-06-29-longchat), the
Ring Attention paper's test of long contexts. Every step of the context shows a pair, a key and a
value; every step of the last trajectory shows the key of one of them alone, and the action to take
is its value. No two pairs share a key, so that only the step that showed it can tell: what a model
gets right beyond chance it has found among all others, at a known distance.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.batches import Batch, Layout, stack, take
from data.sampling import gapped, generator

KEY_BITS = 32


class Questions(NamedTuple):
    """A chain's pairs, and which of them are asked for.

    Attributes:
        key: ``[pairs]`` uint32, all different.
        value: ``[pairs]`` uint32, in as many bits as there are actions.
        asked: int ``[length]``, the pair that each step of the last trajectory asks for.
    """

    key: np.ndarray
    value: np.ndarray
    asked: np.ndarray


@dataclass(frozen=True)
class RecallSampler:
    """Draws chains of pairs; a `data.sampling.Sampler`.

    An observation is the key's bits, the value's (zeros where it is asked for), zeros, and whether
    it asks; bits are −1 and 1. Returns and rewards are alike everywhere and tell nothing.

    Attributes:
        observation: O, at least 32 + A + 1.
        action: A, bits of a value: chance is 2^−A.
        trajectories: n, the asking one included, at least 2.
        length: steps in a trajectory, one token each.
        chains: B.
        index_range: trajectory indices are a sorted random subset of 0…index_range−1.
        cross_episode: trajectories may know of each other; without, there is no telling.
    """

    observation: int
    action: int
    trajectories: int
    length: int
    chains: int
    index_range: int
    cross_episode: bool = True

    def __post_init__(self) -> None:
        """Refuse what leaves nothing to ask or nowhere to show it.

        Raises:
            ValueError: as said.
        """
        if self.trajectories < 2:
            raise ValueError(f"trajectories={self.trajectories}: the last asks, so 2 at least")
        if self.observation < KEY_BITS + self.action + 1:
            raise ValueError(
                f"observation={self.observation} has no room for {KEY_BITS} bits of a key, "
                f"{self.action} of a value and a mark; give {KEY_BITS + self.action + 1} or more"
            )

    @property
    def layout(self) -> Layout:
        """See `data.sampling.Sampler`."""
        return "zigzag" if self.cross_episode else "contiguous"

    @property
    def context(self) -> int:
        """Steps of the context, each with a pair."""
        return (self.trajectories - 1) * self.length

    def trajectories_at(self, seed: int, step: int) -> int:
        """See `data.sampling.Sampler`."""
        return self.trajectories

    def shape(self, seed: int, step: int) -> tuple[int, int]:
        """See `data.sampling.Sampler`."""
        return self.chains, self.context + self.length

    def questions(self, seed: int, step: int, row: int) -> Questions:
        """The pairs of one chain; one of each `length`-th part of the context is asked for."""
        rng = generator(seed, step, row)
        first = rng.integers(2**KEY_BITS, dtype=np.uint32)
        value = rng.integers(2**self.action, size=self.context, dtype=np.uint32)
        edges = np.linspace(0, self.context, self.length + 1).astype(int)
        asked = rng.permutation(rng.integers(edges[:-1], edges[1:]))
        return Questions(_mixed(first + np.arange(self.context, dtype=np.uint32)), value, asked)

    def distances(self, seed: int, step: int, row: int) -> np.ndarray:
        """Steps from where a pair was shown to where it is asked for, int ``[length]``."""
        asked = self.questions(seed, step, row).asked
        return self.context + np.arange(self.length) - asked

    def part(self, seed: int, step: int, rows: np.ndarray, steps: np.ndarray) -> Batch:
        """See `data.sampling.Sampler`."""
        whole = stack([self._chain(seed, step, row) for row in map(int, rows)])
        return take(whole, np.arange(len(rows)), steps)

    def names(self, seed: int, step: int) -> Iterator[str]:
        """See `data.sampling.Sampler`."""
        return (f"chain {row}: {self.context} pairs" for row in range(self.chains))

    def _chain(self, seed: int, step: int, row: int) -> Batch:
        pairs, context = self.questions(seed, step, row), self.context
        shown = np.append(np.arange(context), pairs.asked)
        action = _bits(pairs.value[shown], self.action)
        observation = np.zeros((len(shown), self.observation), np.float32)
        observation[:, :KEY_BITS] = _bits(pairs.key[shown], KEY_BITS)
        observation[:context, KEY_BITS : KEY_BITS + self.action] = action[:context]
        observation[context:, -1] = 1
        indices = gapped(self.index_range, seed, step, row, self.trajectories)
        order = np.arange(len(shown), dtype=np.int32)
        nothing = np.zeros((len(shown), 1), np.float32)
        return Batch(
            return_to_go=nothing,
            observation=observation,
            action=action,
            reward=nothing,
            completion=nothing,
            previous_action=np.zeros_like(action),
            previous_reward=nothing,
            previous_completion=nothing,
            timestep=order % self.length,
            trajectory=indices.astype(np.int32)[order // self.length],
            order=order,
            chain=np.full_like(order, row),
            loss_mask=(order >= context).astype(np.float32),
        )


def _mixed(code: np.ndarray) -> np.ndarray:
    """A permutation of all uint32 that leaves no pattern (hash-prospector's lowbias32)."""
    code = code ^ (code >> 16)
    code = code * np.uint32(0x7FEB352D)
    code = code ^ (code >> 15)
    code = code * np.uint32(0x846CA68B)
    return code ^ (code >> 16)


def _bits(code: np.ndarray, count: int) -> np.ndarray:
    """The lowest bits ``[…, count]`` of uint32 ``[…]`` as −1 and 1, float32."""
    return (((code[..., None] >> np.arange(count, dtype=np.uint32)) & 1) * 2.0 - 1).astype("f4")
