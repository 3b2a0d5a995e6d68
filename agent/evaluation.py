"""Evaluation: rollouts under several contexts, as one flat table of episode returns.

Contexts (what precedes the agent's own episodes):
    self        nothing; n own episodes follow each other, so the first has no context at all.
    dataset     n − 1 held-out episodes under the true task, ascending, relabelled; one episode.
    wrong_task  the same under another task of the hidden group; one episode.
"""

import csv
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from agent import policy as policies
from agent.checkpoint import Agent
from agent.rollout import rollout
from data.batches import Batch, stack
from data.hindsight import chain
from data.packing import pack, steps_in
from data.pool import Pool
from exorl.tasks import task as task_of

Context = Literal["self", "dataset", "wrong_task"]


class Result(NamedTuple):
    """The return of one episode.

    Attributes:
        method: of the agent.
        seed: of its training.
        task: whose reward was earned.
        context: what preceded the chain's first own episode.
        chain: index of the rollout.
        episode: index of the own episode within the chain.
        episode_return: raw sum of rewards.
        percent: of the task's attainable return (`Pool.best_return`).
    """

    method: str
    seed: int
    task: str
    context: str
    chain: int
    episode: int
    episode_return: float
    percent: float


def contexts_of(agent: Agent) -> tuple[Context, ...]:
    """The contexts that tell something about an agent: only a hidden task can be mistaken."""
    return ("self", "dataset", "wrong_task") if len(agent.best_returns) > 1 else ("self",)


def evaluate(
    agent: Agent,
    pool: Pool,
    *,
    contexts: Sequence[Context],
    rollouts: int = 20,
    seed: int = 0,
    target: float = 1.0,
) -> list[Result]:
    """Roll an agent out on each of its tasks under each context.

    Args:
        agent: any method; baselines forget everything between episodes.
        pool: where contexts are drawn from, held-out episodes only.
        contexts: which contexts.
        rollouts: chains for each task and context; initial states are the same for all contexts.
        seed: of initial states and drawn contexts.
        target: return-to-go at the start, in units of the attainable return.

    Raises:
        ValueError: a context that the agent or the pool cannot have.
    """
    trajectories = agent.config.data.trajectories
    _check(agent, pool, contexts, trajectories)
    results = []
    for name in pool.tasks:
        for context in contexts:
            episodes = trajectories if context == "self" else 1
            drawn = None
            if context != "self":
                shown = name if context == "dataset" else _other(pool.tasks, name)
                drawn = draw_context(
                    agent, pool, shown, rollouts, trajectories - 1, seed=seed, target=target
                )
            returns = _returns(agent, name, drawn, rollouts, episodes, seed, target)
            results += [
                Result(
                    method=agent.config.method,
                    seed=agent.config.seed,
                    task=name,
                    context=context,
                    chain=row,
                    episode=episode,
                    episode_return=float(returns[row, episode]),
                    percent=100 * float(returns[row, episode]) / agent.best_returns[name],
                )
                for row in range(rollouts)
                for episode in range(episodes)
            ]
    return results


def draw_context(
    agent: Agent,
    pool: Pool,
    shown: str,
    rollouts: int,
    count: int,
    *,
    seed: int,
    target: float,
) -> Batch:
    """Held-out episodes as chains that precede each rollout, relabelled for the ``shown`` task.

    Sorted, relabelled and packed as the agent's training chains were.

    Returns:
        A batch ``[rollouts, S, …]`` of chains of ``count`` episodes drawn without replacement.
    """
    scale = agent.best_returns[shown]
    rows = []
    for row in range(rollouts):
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(row,)))
        episodes = rng.choice(pool.held_out, count, replace=False)
        drawn = [pool.trajectory(episode, shown) for episode in episodes]
        model, data = agent.config.model, agent.config.data
        preceding = chain(
            drawn,
            target=target * scale if data.relabel == "best" else None,
            scale=scale,
            relabel=data.relabel,
            context=data.context,
            rng=rng,
        )
        rows.append(pack(preceding, chunk=model.chunk, cross_episode=model.cross_episode))
    batch = stack(rows)
    return batch._replace(observation=agent.normalizer(batch.observation))


def episode_seeds(seed: int, rollouts: int, episodes: int) -> np.ndarray:
    """Initial-state seeds ``[rollouts, episodes]``, each a function of (seed, chain, episode)."""
    return np.array(
        [
            [
                np.random.SeedSequence(seed, spawn_key=(row, episode)).generate_state(1)[0]
                for episode in range(episodes)
            ]
            for row in range(rollouts)
        ]
    )


def _returns(
    agent: Agent,
    name: str,
    context: Batch | None,
    rollouts: int,
    episodes: int,
    seed: int,
    target: float,
) -> np.ndarray:
    info, chunk = task_of(name), agent.config.model.chunk
    remembered = episodes if agent.config.method == "at" else 1
    steps = steps_in(info.episode_length, chunk) * remembered
    policy = policies.make(agent, batch=rollouts, steps=steps, context=context)
    return rollout(
        policy,
        name,
        episode_seeds(seed, rollouts, episodes),
        normalizer=agent.normalizer,
        chunk=chunk,
        scale=agent.best_returns[name],
        target=target,
        context=context,
        cross_episode=agent.config.model.cross_episode,
    )


def _other(tasks: Sequence[str], name: str) -> str:
    return tasks[(list(tasks).index(name) + 1) % len(tasks)]


def _check(agent: Agent, pool: Pool, contexts: Sequence[Context], trajectories: int) -> None:
    shown = [context for context in contexts if context != "self"]
    if not shown:
        return
    if agent.config.method != "at":
        raise ValueError(f"method {agent.config.method} takes no context, asked for {shown}")
    if "wrong_task" in shown and len(pool.tasks) < 2:
        raise ValueError(f"a wrong task needs a hidden group, the agent knows only {pool.tasks}")
    if len(pool.held_out) < trajectories - 1 or trajectories < 2:
        raise ValueError(
            f"a context of {trajectories - 1} held-out episodes cannot be drawn from "
            f"{len(pool.held_out)} in {pool.store.path}"
        )


def write_csv(path: Path, results: Iterable[Result]) -> None:
    """One row an episode; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Result._fields)
        writer.writerows(results)
    os.replace(unfinished, path)


def read_csv(path: Path) -> list[Result]:
    """Inverse of `write_csv`."""
    with path.open(newline="") as file:
        return [
            Result(
                method=row["method"],
                seed=int(row["seed"]),
                task=row["task"],
                context=row["context"],
                chain=int(row["chain"]),
                episode=int(row["episode"]),
                episode_return=float(row["episode_return"]),
                percent=float(row["percent"]),
            )
            for row in csv.DictReader(file)
        ]
