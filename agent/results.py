"""What evaluations found: a cell a chain, kept as lines of JSON, and a row an episode as CSV."""

import contextlib
import csv
import dataclasses
import importlib.metadata
import io
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from exorl.paths import write_whole
from exorl.tasks import normalized


class Result(NamedTuple):
    """The return of one episode.

    Attributes:
        method: of the agent.
        seed: of its training.
        task: whose reward was earned.
        context: what preceded it, see `agent.protocol.Context`.
        n: most trajectories in the sequence; for baselines, their episodes.
        multiplier: of the target.
        chain: index of the chain.
        env: index of the environment under the chain's context.
        episode: index of the own episode within the chain.
        episode_return: raw sum of rewards.
        target: raw return-to-go it began with.
        percent: of the task's attainable return (`Pool.best_return`).
        normalized: 0 is a random policy, 100 the reference (`exorl.normalized`).
        labels: what sets it apart, joined by +.
    """

    method: str
    seed: int
    task: str
    context: str
    n: int
    multiplier: float
    chain: int
    env: int
    episode: int
    episode_return: float
    target: float
    percent: float
    normalized: float
    labels: str


@dataclass(frozen=True)
class Cell:
    """One chain under one protocol, with all that its numbers depend on.

    Attributes:
        checkpoint: identity of the parameters.
        method: of the agent.
        train_seed: of its training.
        task: whose reward was earned.
        protocol: fields of `agent.protocol.Protocol`.
        seed: of initial states and drawn contexts.
        chain: index of the chain.
        best_return: the task's attainable return, raw.
        versions: of the libraries.
        returns: raw ``[envs, episodes]``.
        targets: raw return-to-go at the start, ``[envs, episodes]``.
        labels: ``[envs, episodes]``, what sets an episode apart.
    """

    checkpoint: str
    method: str
    train_seed: int
    task: str
    protocol: dict[str, Any]
    seed: int
    chain: int
    best_return: float
    versions: str
    returns: list[list[float]]
    targets: list[list[float]]
    labels: list[list[str]]

    @property
    def key(self) -> str:
        """What tells the cell from all others of the same checkpoint file."""
        return key(self.checkpoint, self.task, self.protocol, self.seed, self.chain)

    def results(self) -> list[Result]:
        """One row an episode."""
        return [
            Result(
                method=self.method,
                seed=self.train_seed,
                task=self.task,
                context=self.protocol["context"],
                n=self.protocol["n"],
                multiplier=self.protocol["multiplier"],
                chain=self.chain,
                env=env,
                episode=episode,
                episode_return=earned,
                target=self.targets[env][episode],
                percent=100 * earned / self.best_return,
                normalized=float(normalized(self.task, earned)),
                labels=self.labels[env][episode],
            )
            for env, row in enumerate(self.returns)
            for episode, earned in enumerate(row)
        ]


def versions() -> str:
    """The libraries that a score depends on."""
    names = ("exoring", "jax", "flax", "optax", "mujoco", "dm-control", "numpy")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def key(checkpoint: str, task: str, protocol: dict[str, Any], seed: int, chain: int) -> str:
    """See `Cell.key`."""
    return json.dumps([checkpoint, task, protocol, seed, chain], sort_keys=True)


def append(path: Path, cells: Iterable[Cell]) -> None:
    """Add cells to a file, all by one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(dataclasses.asdict(cell)) + "\n" for cell in cells)
    with path.open("a+b") as file:
        torn = False
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        file.write(b"\n" * torn + lines.encode())


def read(path: Path) -> list[Cell]:
    """The cells of a file, without lines that a crash left unfinished.

    Raises:
        ValueError: another version wrote the file.
    """
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    try:
        return [Cell(**values) for values in found]
    except TypeError as error:
        raise ValueError(f"{path} is of another version ({error}); move it away") from error


def flat(cells: Iterable[Cell]) -> list[Result]:
    """One row an episode."""
    return [result for cell in cells for result in cell.results()]


def write_csv(path: Path, results: Iterable[Result]) -> None:
    """One row an episode; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(Result._fields)
    writer.writerows(results)
    write_whole(path, text.getvalue().encode())


def read_csv(path: Path) -> list[Result]:
    """Inverse of `write_csv`."""
    kinds = Result.__annotations__
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [Result(**{name: kinds[name](row[name]) for name in Result._fields}) for row in rows]


def select(results: Sequence[Result], **wanted: Any) -> list[Result]:
    """Results whose fields have the given values."""
    return [r for r in results if all(getattr(r, name) == value for name, value in wanted.items())]


def values_of(results: Sequence[Result], field: str) -> list[Any]:
    """Distinct values of a field, sorted."""
    return sorted({getattr(each, field) for each in results})


def grid(results: Sequence[Result], field: str = "episode_return") -> np.ndarray:
    """Results of one agent, task and protocol as ``[chains, episodes]``, see `units`.

    Raises:
        ValueError: a cell is missing or there twice.
    """
    return units(whole(results, field))


def units(values: np.ndarray) -> np.ndarray:
    """Values ``[chains, envs, …]`` of what an interval is over: ``[chains, …]``.

    Environments under one context are not independent of each other: a chain has their mean. Of a
    single chain ``[envs, …]``: an interval is then of initial states under that one context.
    """
    return values.mean(axis=1) if len(values) > 1 else values[0]


def whole(results: Sequence[Result], field: str = "episode_return") -> np.ndarray:
    """Results of one agent, task and protocol as ``[chains, envs, episodes]``.

    Raises:
        ValueError: a cell is missing or there twice.
    """
    cells = {(each.chain, each.env, each.episode): getattr(each, field) for each in results}
    shape = tuple(1 + max(at[axis] for at in cells) for axis in range(3))
    if not len(cells) == len(results) == np.prod(shape):
        chains, envs, episodes = shape
        raise ValueError(
            f"{len(results)} results do not fill {chains} chains × {envs} environments × "
            f"{episodes} episodes"
        )
    values = np.empty(shape)
    for at, value in cells.items():
        values[at] = value
    return values
