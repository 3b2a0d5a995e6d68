"""Evaluation: rollouts under several protocols, one cell a chain."""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from agent import policy as policies
from agent import processes
from agent.checkpoint import Agent
from agent.config import TRANSFORMERS, TrainConfig
from agent.history import Alone, History, packed
from agent.policy import Policy
from agent.protocol import Context, Protocol, beats, best_return
from agent.results import Cell, key, versions
from agent.rollout import Rolled, rollout
from agent.simulation import simulate
from data.packing import steps_in
from data.pool import Pool
from exorl.tasks import task as task_of


def contexts_of(agent: Agent) -> tuple[Context, ...]:
    """The contexts that tell something about an agent: only a hidden task can be mistaken."""
    return ("self", "dataset_sorted", "wrong_task") if len(agent.best_returns) > 1 else ("self",)


@dataclass(frozen=True)
class Group:
    """Chains of a task under a protocol that are rolled out together.

    Attributes:
        task: whose reward is earned.
        protocol: what precedes their own episodes.
        chains: their indices.
        filling: indices of finished chains, rolled out once more after the others so that all
            devices have equally many; what they find is dropped.
    """

    task: str
    protocol: Protocol
    chains: tuple[int, ...]
    filling: tuple[int, ...] = ()

    @property
    def rolled(self) -> tuple[int, ...]:
        """All chains that are rolled out, those that count first."""
        return self.chains + self.filling

    @property
    def rows(self) -> int:
        """Environments that run at the same time, those of a chain beside each other."""
        return len(self.rolled) * self.protocol.envs

    @property
    def steps(self) -> int:
        """Environment steps of all of them."""
        return self.rows * self.protocol.own * task_of(self.task).episode_length


class Seen(NamedTuple):
    """What the environments of a group did, for those who want to look.

    Attributes:
        group: which.
        seeds: ``[rows, episodes]``, the initial states.
        rolled: the episodes.
        low: ``[rows]`` bool, whether less was asked for than the best of the context.
    """

    group: Group
    seeds: np.ndarray
    rolled: Rolled
    low: np.ndarray

    def labels(self, config: TrainConfig) -> list[list[str]]:
        """What sets each episode apart, joined by +: ``[rows, episodes]``."""
        protocol = self.group.protocol
        always = {
            "extrapolated": config.method == "at" and protocol.n > config.data.trajectories,
            "shared_prefix": protocol.share_prefix
            and protocol.multiplier != 1
            and protocol.drawn > 0
            and config.method == "at",
        }

        def label(row: int, episode: int) -> str:
            here = always | {
                "low_target": self.low[row],
                "stale": self.rolled.stale[row, episode],
                "evicted": self.rolled.evicted[episode],
            }
            return "+".join(name for name, true in here.items() if true)

        rows, episodes = self.seeds.shape
        return [[label(row, episode) for episode in range(episodes)] for row in range(rows)]


@dataclass(frozen=True)
class Evaluation:
    """Rolls an agent out on its tasks.

    Attributes:
        agent: any method; baselines forget everything between episodes.
        pool: where contexts are drawn from.
        checkpoint: identity of the agent's parameters.
        chains: for each task and protocol; initial states are the same for all protocols.
        seed: of initial states and drawn contexts.
        together: chains at a time, by default all; where environments share a chain's context, one.
    """

    agent: Agent
    pool: Pool
    checkpoint: str = ""
    chains: int = 20
    seed: int = 0
    together: int | None = None

    def plan(self, protocols: Sequence[Protocol], finished: Sequence[Cell] = ()) -> list[Group]:
        """What is to be rolled out: the chains whose cells are not finished.

        Raises:
            ValueError: a protocol that the agent or the data cannot have, or environments that do
                not divide over the mesh.
        """
        done = {cell.key for cell in finished}
        planned = []
        for protocol in protocols:
            protocol.check(self.agent.config, self.pool)
        for task, protocol in itertools.product(self.pool.tasks, protocols):
            chains = range(self.chains)
            spare = [chain for chain in chains if self._key(task, protocol, chain) in done]
            left = sorted({*chains} - {*spare})
            planned += self._groups(task, protocol, left, spare)
        stamp = zlib.crc32(repr(planned).encode()) >> 1
        if processes.agreed(np.array(stamp)) != stamp:
            raise ValueError("the processes of this run have different files of finished cells")
        return planned

    def keys(self, protocols: Sequence[Protocol]) -> list[str]:
        """Of the cells that belong to the protocols."""
        return [
            self._key(task, protocol, chain)
            for task, protocol in itertools.product(self.pool.tasks, protocols)
            for chain in range(self.chains)
        ]

    def _groups(
        self, task: str, protocol: Protocol, left: Sequence[int], spare: Sequence[int]
    ) -> Iterator[Group]:
        """The chains that are left, so many together, filled up with finished ones."""
        mesh, transformer = self.agent.mesh.shape, self.agent.config.method in TRANSFORMERS
        shards = mesh["data"] * mesh["fsdp"] if transformer else 1
        size = 1 if protocol.envs > 1 else self.together or self.chains
        for first in range(0, len(left), size):
            chains = tuple(left[first : first + size])
            missing = -len(chains) % shards if protocol.envs == 1 else 0
            group = Group(task, protocol, chains, tuple(spare[:missing]))
            if group.rows % shards:
                raise ValueError(
                    f"{group.rows} environments at a time do not divide over mesh.data × mesh.fsdp "
                    f"= {shards}; make chains, together and, above 1, envs multiples of it"
                )
            yield group

    def _key(self, task: str, protocol: Protocol, chain: int) -> str:
        return key(self.checkpoint, task, dataclasses.asdict(protocol), self.seed, chain)

    def run(
        self,
        planned: Sequence[Group],
        *,
        progress: Callable[[int], object] = lambda steps: None,
        watch: Callable[[Seen], object] = lambda seen: None,
    ) -> Iterator[list[Cell]]:
        """Cells of each group, as soon as it is done.

        Args:
            planned: by `plan`.
            progress: told the environment steps as they are done.
            watch: shown what the environments did.
        """
        policy, made_for = None, None
        for group in planned:
            needed = {
                "batch": group.rows,
                "steps": self._known(group),
                "dtype": group.protocol.cache,
            }
            if policy is None or made_for != needed:
                policy, made_for = None, needed  # at most one cache at a time
                policy = policies.make(self.agent, **needed)
            seen = self._roll(group, policy, progress)
            watch(seen)
            yield self._cells(seen)

    def _known(self, group: Group) -> int:
        """Steps of own episodes that are known at a time, at most."""
        protocol, info = group.protocol, task_of(group.task)
        episodes = min(protocol.own, protocol.room) if self.agent.config.method == "at" else 1
        if protocol.context == "self_resorted":
            episodes = 1
        return episodes * steps_in(info.episode_length, self.agent.config.model.chunk)

    def _roll(self, group: Group, policy: Policy, progress: Callable[[int], object]) -> Seen:
        agent, protocol, task = self.agent, group.protocol, group.task
        shown = protocol.shown(self.pool.tasks, task)
        scale = agent.best_returns[shown]
        contexts = [
            protocol.draw(self.pool, shown, scale, chain, self.seed) for chain in group.rolled
        ]
        goals = [protocol.goal(self.pool, shown, scale, context) for context in contexts]
        targets = np.repeat(goals, protocol.envs)
        seeds = np.concatenate(
            [episode_seeds(self.seed, chain, protocol.envs, protocol.own) for chain in group.rolled]
        )
        history = Alone(targets)
        if isinstance(policy, policies.ChainPolicy) and agent.config.method == "at":
            prefix = None
            if protocol.share_prefix:
                usual = dataclasses.replace(protocol, multiplier=1.0)
                prefix = packed(
                    agent, contexts, [usual.goal(self.pool, shown, scale, c) for c in contexts]
                )
            history = History(agent, policy, protocol, targets, contexts, prefix)
        rolled = rollout(
            agent,
            policy,
            simulate(task, group.rows),
            seeds,
            scale=agent.best_returns[task],
            history=history,
            progress=progress,
        )
        low = beats([best_return(context) for context in contexts], goals)
        return Seen(group, seeds, rolled, np.repeat(low, protocol.envs))

    def _cells(self, seen: Seen) -> list[Cell]:
        group, rolled, config = seen.group, seen.rolled, self.agent.config
        scale, envs = self.agent.best_returns[group.task], group.protocol.envs
        labels = seen.labels(config)
        cells = []
        for place, chain in enumerate(group.chains):
            rows = slice(place * envs, (place + 1) * envs)
            cells.append(
                Cell(
                    checkpoint=self.checkpoint,
                    method=config.method,
                    train_seed=config.seed,
                    task=group.task,
                    protocol=dataclasses.asdict(group.protocol),
                    seed=self.seed,
                    chain=chain,
                    best_return=scale,
                    versions=versions(),
                    returns=rolled.returns[rows].tolist(),
                    targets=(scale * rolled.targets[rows]).tolist(),
                    labels=labels[rows],
                )
            )
        return cells


def episode_seeds(seed: int, chain: int, envs: int, episodes: int) -> np.ndarray:
    """Initial-state seeds ``[envs, episodes]``, each a function of (seed, chain, env, episode)."""
    keys = [
        [(chain, e) if env == 0 else (chain, e, env) for e in range(episodes)]
        for env in range(envs)
    ]
    return np.array(
        [
            [np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0] for key in row]
            for row in keys
        ]
    )
