"""Where the episodes to check lie: folders, zips and stores look alike from here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from exorl import episodes as files
from exorl.episodes import Episode, EpisodeError
from exorl.store import EpisodeStore
from exorl.tasks import TASKS, Task

_SIZED = ("observation", "action", "physics")


class VerifyError(ValueError):
    """A source that can't be checked at all; the message names it and the fault."""


@dataclass(frozen=True)
class Member:
    """One episode of a source, not read yet."""

    collector: str
    file: str
    number: int
    read: Callable[[Task | None], Episode]  # checked as `exorl.episodes.read` does
    digest: str | None = None  # recorded by a store

    @property
    def label(self) -> str:
        """What reports call it."""
        return f"{self.collector}/{self.file}"


@dataclass(frozen=True)
class Source:
    """Episodes and what is known about them all."""

    members: list[Member]
    domain: str | None  # None if it was neither given nor recorded
    selected: bool = False  # whether a store left out episodes by intention
    skipped: tuple[str, ...] = ()  # why a store left out others


def open_source(path: Path, domain: str | None) -> Source:
    """The episodes in a folder, zip or store; see `exorl.verify.verify` for what it raises."""
    if (path / "index.json").exists():
        return _of_store(EpisodeStore(path), domain)
    whole = path.resolve()
    # As packing names them.
    name = whole.parent.name if path.name == "buffer" else whole.name.removesuffix(".zip")
    members = [
        Member(name, file.path.name, file.index, partial(files.read, file.path))
        for file in files.find(path)
    ]
    if not members:
        raise VerifyError(f"{path}: no episodes (episode_000000_1000.npz and so on) in it")
    return Source(members, domain)


def _of_store(store: EpisodeStore, domain: str | None) -> Source:
    if domain not in (None, store.domain):
        raise VerifyError(f"{store.path}: holds {store.domain} episodes, not {domain}")

    def read(i: int, task: Task | None) -> Episode:
        episode = store[i]
        files.check(episode, members[i].label, len(episode), task)
        return episode

    members = [
        Member(
            entry["collector"], entry["file"], entry["episode"], partial(read, i), entry["digest"]
        )
        for i, entry in enumerate(store.index["episodes"])
    ]
    return Source(
        members,
        store.domain,
        selected=store.index["selection"]["episodes"] is not None,
        skipped=tuple(skipped["reason"] for skipped in store.index["skipped"]),
    )


def infer_domain(members: list[Member]) -> str | None:
    """The domain whose sizes the first readable episode has; None if none can be read.

    Raises:
        VerifyError: No domain has these sizes.
    """
    for member in members:
        try:
            episode = member.read(None)
        except EpisodeError:
            continue
        sizes = tuple(getattr(episode, name).shape[1] for name in _SIZED)
        for task in TASKS.values():
            if sizes == (task.observation_dim, task.action_dim, task.physics_dim):
                return task.domain
        has = ", ".join(f"{name} {size}" for name, size in zip(_SIZED, sizes, strict=True))
        raise VerifyError(f"{member.label}: has the sizes ({has}) of no domain")
    return None
