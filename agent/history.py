"""What the sequence of a rollout holds, and what is done when that is to change.

The policy keeps keys and values; this keeps the trajectories they stand for, so that they can be
computed anew ("reprefill"): in another order, for another target, or without the oldest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from agent import networks
from agent.checkpoint import Agent
from agent.protocol import Protocol as Evaluation
from agent.protocol import beats, best_return
from data.batches import Batch, stack, take
from data.hindsight import Chain, Trajectory, ascending
from data.packing import pack, steps_in


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
    def last_of(cls, context: Batch, batch: int) -> "Before":
        """What precedes the first step of ``batch`` environments after a packed context."""
        last = (context.action[:, -1], context.reward[:, -1], context.completion[:, -1])
        return cls(*(np.broadcast_to(each, (batch, *each.shape[1:])) for each in last))


class Remembering(Protocol):
    """A policy whose memory can be replaced and shortened, see `agent.policy.ChainPolicy`."""

    def remember(self, context: Batch | None) -> None:
        """Know these chains and nothing else."""
        ...

    def forget(self, before: int) -> None:
        """Leave out all steps before this one."""
        ...


class Start(NamedTuple):
    """How an episode begins.

    Attributes:
        targets: ``[B]`` return-to-go, in units.
        stale: ``[B]`` bool: an earlier return has beaten the target.
        evicted: whether trajectories had been evicted.
        index: of the trajectory in the sequence.
        before: what its first step is told of the step before; None: what happened.
    """

    targets: np.ndarray
    stale: np.ndarray
    evicted: bool
    index: int
    before: Before | None


def packed(
    agent: Agent, rows: Sequence[Sequence[Trajectory]], targets: Sequence[float] | np.ndarray
) -> Batch | None:
    """Trajectories in their order as sequences, relabelled and packed as the agent's training was.

    Args:
        agent: whose normaliser and settings they are.
        rows: equally many of equal lengths in each, rewards in units.
        targets: return-to-go at the start of all trajectories of a row, in units.

    Returns:
        A batch ``[rows, S, …]``, or None where there are no trajectories.
    """
    model, own = agent.config.model, agent.config.data.relabel == "own"
    if not rows or not rows[0]:
        return None
    chains = [
        Chain(
            trajectories=tuple(row),
            targets=tuple(each.episode_return if own else float(target) for each in row),
            scale=1.0,
        )
        for row, target in zip(rows, targets, strict=True)
    ]
    batch = stack([pack(c, chunk=model.chunk, cross_episode=model.cross_episode) for c in chains])
    return batch._replace(observation=agent.normalizer(batch.observation))


class Alone:
    """Episodes of a baseline, which forgets everything between them.

    Args:
        targets: ``[B]`` return-to-go at the start of an episode, in units.
    """

    def __init__(self, targets: np.ndarray) -> None:
        self._targets, self._held = targets, 0

    def begin(self) -> Start:
        """See `History.begin`."""
        return Start(self._targets, np.zeros(len(self._targets), bool), False, self._held, None)

    def end(self, trajectories: Sequence[Trajectory]) -> None:
        """See `History.end`."""
        self._held += 1


@dataclass
class History:
    """The trajectories of B environments' sequences.

    Attributes:
        agent: whose normaliser and settings they are.
        policy: keeps the same as keys and values.
        protocol: what is kept, and in which order.
        targets: ``[B]`` return-to-go at the start of an episode, in units.
        context: what precedes the own ones, of each environment or of all of them (one row).
        prefix: the context packed for another target, to be used instead; or None.
    """

    agent: Agent
    policy: Remembering
    protocol: Evaluation
    targets: np.ndarray
    context: Sequence[Sequence[Trajectory]]
    prefix: Batch | None = None

    def __post_init__(self) -> None:
        self._own: list[list[Trajectory]] = [[] for _ in self.targets]
        self._held = 0  # trajectories in the sequence, evicted ones included
        self._evicted = False

    def begin(self) -> Start:
        """Make room and put things in order for the next episode."""
        stale = beats([best_return(own) for own in self._own], self.targets)
        before = None
        if not self._own[0]:
            before = self._start()
        elif self._is_due(bool(stale.any())):
            if self.protocol.stale == "reprefill":
                best = [best_return(self._sequence(row)) for row in range(len(stale))]
                self.targets = np.where(stale, np.maximum(self.targets, best), self.targets)
                stale = np.zeros_like(stale)
            before = self._refill()
        elif self._held >= self.protocol.room:
            before = self._evict()
        last = self.protocol.room - 1
        learned = self.agent.config.model.positions == "learned"
        index = min(self._held, last) if learned else self._held
        return Start(self.targets, stale, self._evicted, index, before)

    def end(self, trajectories: Sequence[Trajectory]) -> None:
        """Take in what each environment did, rewards in units; the policy has seen it already."""
        for own, trajectory in zip(self._own, trajectories, strict=True):
            own.append(trajectory)
        self._held += 1

    def _is_due(self, stale: bool) -> bool:
        """Whether the sequence is to be computed anew."""
        full = self._held >= self.protocol.room
        return (
            self.protocol.context == "self_resorted"
            or (stale and self.protocol.stale == "reprefill")
            or (full and self.protocol.beyond == "reprefill")
        )

    def _sequence(self, row: int) -> list[Trajectory]:
        """What precedes the next episode of an environment, without what there is no room for."""
        context = self.context[row if len(self.context) > 1 else 0] if self.context else []
        whole = [*context, *self._own[row]]
        if self.protocol.context == "self_resorted":
            whole = [whole[i] for i in ascending([each.episode_return for each in whole])]
        return whole[max(0, len(whole) - (self.protocol.room - 1)) :]

    def _start(self) -> Before:
        prefix = self.prefix
        if prefix is None:
            prefix = packed(self.agent, self.context, self.targets[: len(self.context)])
        self._held = self.protocol.drawn
        self.policy.remember(prefix)
        return self._before(prefix)

    def _refill(self) -> Before:
        rows = [self._sequence(row) for row in range(len(self.targets))]
        batch = packed(self.agent, rows, self.targets)
        self._held, self._evicted = len(rows[0]), False
        if batch is None:
            self.policy.remember(None)
        else:
            # Padded to a power of two, or every length would have to be compiled for.
            steps = batch.order.shape[1] // self._held * 2 ** (self._held - 1).bit_length()
            self.policy.remember(take(batch, np.arange(len(rows)), np.arange(steps)))
        return self._before(batch)

    def _evict(self) -> Before | None:
        # Trajectories that do not know of each other need none kept; and with learned positions
        # the one kept last has the index, by which they are told apart, that the next one gets.
        kept = self.protocol.room - 1 if self.agent.config.model.cross_episode else 0
        steps = steps_in(len(self._own[0][0]), self.agent.config.model.chunk)
        self.policy.forget((self._held - kept) * steps)
        if not kept:
            return self._before(None)
        self._evicted = True
        return None

    def _before(self, context: Batch | None) -> Before:
        batch = len(self.targets)
        if context is None:
            return Before.nothing(batch, networks.dimensions(self.agent.config).action)
        return Before.last_of(context, batch)
