"""Packing: files of episodes into one store, which appears whole or not at all."""

import collections
import contextlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from exorl import episodes as files
from exorl.datasets import MIXES
from exorl.episodes import DTYPES, FIELDS, EpisodeError, EpisodeFile
from exorl.parallel import cores
from exorl.store import SCHEMA, EpisodeStore, StoreError, digest
from exorl.tasks import Task, domain_tasks

# Decoding threads at most: what each does in Python, some tenth of its time, they do by turns.
_THREADS = 8

# Episodes that a thread decodes before it hands them over: waking the other side takes time too.
_BATCH = 4

Select = Literal["first", "last", "stratified", "random"]

Progress = Callable[[Sequence[EpisodeFile]], Iterable[EpisodeFile]]


def pack(
    sources: Mapping[str, str | Path] | Sequence[str | Path] | str,
    out: str | Path,
    *,
    domain: str,
    episodes: int | None = None,
    select: Select = "first",
    seed: int = 0,
    skip_bad: bool = False,
    progress: Progress = iter,
) -> EpisodeStore:
    """Packs ExoRL episodes into one store, which appears at `out` whole or not at all.

    Args:
        sources: Folders or zips of episodes by collector name; a bare list is named by the files
            themselves (the parent of a `buffer`). A string names one of `exorl.datasets.MIXES`,
            of datasets that `scripts.download` has fetched; how many episodes it says itself.
        out: Where the store shall be. One that is there already is kept if it is the same.
        domain: Whose sizes the episodes must have.
        episodes: Only so many of each source; None for all.
        select: Which of them, by number: the `first`, which explored least, the `last`, the first
            of each of so many equal stretches (`stratified`), or a `random` choice.
        seed: Of the random choice, which also depends on the collector's name.
        skip_bad: Leaves out episodes that can't be used and lists them in the index.
        progress: Wraps the list of files while it is worked off; `tqdm.tqdm` fits.

    Raises:
        EpisodeError: An episode can't be used, unless `skip_bad`.
        FileNotFoundError: Datasets of the mix are missing; how to fetch each is said.
        StoreError: Nothing to pack, or something else is at `out`.
        TaskError: There is no such domain.
    """
    out, task = Path(out), domain_tasks(domain)[0]
    mix = sources if isinstance(sources, str) else None
    if mix is not None:
        sources, episodes = _mixed(mix, domain, episodes, select)
    folders = _named(sources)
    plan = [
        (name, file)
        for name, folder in folders.items()
        for file in _choose(name, folder, episodes, select, seed)
    ]
    if not plan:
        raise StoreError("no sources to pack: name at least one folder of episodes")
    origin = {
        "sources": {name: str(folder) for name, folder in folders.items()},
        "selection": {"mix": mix, "episodes": episodes, "select": select, "seed": seed},
    }
    _refuse_others(out, plan, task, skip_bad)
    _build(out, plan, task, origin, skip_bad, progress)
    return EpisodeStore(out)


def _build(
    out: Path,
    plan: Sequence[tuple[str, EpisodeFile]],
    task: Task,
    origin: dict[str, Any],
    skip_bad: bool,
    progress: Progress,
) -> None:
    """Writes the store aside, then moves it to where it shall be."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{out.name}.", dir=out.parent, ignore_cleanup_errors=True
    ) as aside:
        # In it, not itself: others may not read a temporary folder.
        partial = Path(aside) / "store"
        partial.mkdir()
        listed, skipped = _write_fields(plan, partial, task, skip_bad, progress)
        index = {
            "schema": SCHEMA,
            "domain": task.domain,
            "fingerprint": digest(task.domain, *(entry["digest"] for entry in listed)),
            "versions": {
                name: importlib.metadata.version(name) for name in ("numpy", "dm-control", "mujoco")
            },
            **origin,
            "skipped": skipped,
            "episodes": listed,
        }
        (partial / "index.json").write_text(json.dumps(index, indent=1))
        if not out.exists():
            os.replace(partial, out)
        elif not _same(out, index):
            raise _something_else(out)


def _refuse_others(
    out: Path, plan: Sequence[tuple[str, EpisodeFile]], task: Task, skip_bad: bool
) -> None:
    """Refuses what can't be the same store, before anything is read to make sure."""
    if not out.exists():
        return
    try:
        there = EpisodeStore(out).index
    except (StoreError, NotADirectoryError) as error:
        raise _something_else(out) from error
    wanted = [(name, file.index, file.path.name) for name, file in plan]
    listed = [(each["collector"], each["episode"], each["file"]) for each in there["episodes"]]
    alike = set(listed) <= set(wanted) if skip_bad else listed == wanted
    if there["domain"] != task.domain or not alike:
        raise _something_else(out)


def _something_else(out: Path) -> StoreError:
    return StoreError(f"{out}: something else is there already; remove it or pack elsewhere")


def _mixed(
    name: str, domain: str, episodes: int | None, select: Select
) -> tuple[dict[str, Path], int]:
    """The sources of a mix, and how many episodes of each."""
    if name not in MIXES:
        raise StoreError(
            f"there is no mix {name!r}, only {', '.join(MIXES)}; give folders as a list"
        )
    if episodes is not None or select != "first":
        raise StoreError(
            f"{name} is the first {MIXES[name].steps:,} steps of each; leave out "
            f"episodes and select, or name the sources one by one"
        )
    return MIXES[name].find(domain), MIXES[name].episodes(domain)


def _named(sources: Mapping[str, str | Path] | Sequence[str | Path]) -> dict[str, Path]:
    if isinstance(sources, Mapping):
        return {name: Path(folder) for name, folder in sources.items()}
    folders = {}
    for folder in map(Path, sources):
        whole = folder.resolve()
        name = whole.parent.name if folder.name == "buffer" else whole.name.removesuffix(".zip")
        if name in folders:
            raise StoreError(f"two sources are called {name!r}: give them as a mapping from names")
        folders[name] = folder
    return folders


def _choose(
    name: str, folder: Path, count: int | None, select: Select, seed: int
) -> list[EpisodeFile]:
    found = files.find(folder)
    if not found:
        # The end of a zip that was cut short can be that of an episode in it, itself a zip.
        cut = ", perhaps because the zip was cut short" if folder.is_file() else ""
        raise StoreError(f"{folder}: no episodes (episode_000000_1000.npz and so on) in it{cut}")
    if count is not None and not 1 <= count <= len(found):
        raise StoreError(f"{folder}: {count} episodes wanted, but there are {len(found)}")
    return [found[i] for i in _selected(len(found), count or len(found), select, (seed, name))]


def _selected(total: int, count: int, select: Select, key: tuple[int, str]) -> np.ndarray:
    """Which `count` of `total`, ascending."""
    if select == "first":
        return np.arange(count)
    if select == "last":
        return np.arange(total - count, total)
    if select == "stratified":
        return np.arange(count) * total // count
    if select == "random":
        rng = np.random.default_rng([key[0], *key[1].encode()])
        return np.sort(rng.choice(total, count, replace=False))
    raise StoreError(f"select is {select!r}, expected first, last, stratified or random")


def _write_fields(
    plan: Sequence[tuple[str, EpisodeFile]],
    folder: Path,
    task: Task,
    skip_bad: bool,
    progress: Progress,
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Streams the planned episodes into one array a field; returns what was packed and not."""
    listed: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    offsets = [0]
    collectors, planned = zip(*plan, strict=True)
    with contextlib.ExitStack() as stack:
        columns = {
            name: stack.enter_context(_Column(folder / f"{name}.npy", DTYPES[name]))
            for name in FIELDS
        }
        decoded = stack.enter_context(contextlib.closing(_decode_ahead(planned, task)))
        for collector, file, rows in zip(collectors, progress(planned), decoded, strict=True):
            if not isinstance(rows, EpisodeError) and len(offsets) > 1:
                rows = _alike(file, rows, columns["reward"].width)
            if isinstance(rows, EpisodeError):
                if not skip_bad:
                    raise rows
                skipped.append({"file": str(file.path), "reason": str(rows)})
                continue
            for name, column in columns.items():
                column.append(rows.fields[name])
            offsets.append(offsets[-1] + len(rows.fields["action"]))
            listed.append(
                {
                    "collector": collector,
                    "episode": file.index,
                    "file": file.path.name,
                    "digest": rows.digest,
                }
            )
    if not listed:
        raise StoreError(
            f"nothing to pack: all {len(skipped)} episodes are bad, such as {skipped[0]['reason']}"
        )
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))
    return listed, skipped


def _alike(file: EpisodeFile, rows: "_Rows", width: int) -> "_Rows | EpisodeError":
    """The rows, unless they hold another number of rewards than the ones before."""
    found = rows.fields["reward"].shape[1]
    if found == width:
        return rows
    return EpisodeError(
        f"{file.path}: {found} recorded rewards a step, the episodes before have {width}; "
        "pack them into stores of their own"
    )


@dataclass(frozen=True)
class _Rows:
    """An episode as it is written."""

    fields: dict[str, np.ndarray]  # [T+1, D] each, contiguous
    digest: str


def _decode(batch: Sequence[EpisodeFile], task: Task) -> list[_Rows | EpisodeError]:
    decoded = []
    for file in batch:
        try:
            episode = files.read(file.path, task)
        except EpisodeError as error:
            decoded.append(error)
        else:
            fields = {name: np.ascontiguousarray(getattr(episode, name)) for name in FIELDS}
            decoded.append(_Rows(fields, digest(*fields.values())))
    return decoded


def _decode_ahead(
    planned: Sequence[EpisodeFile], task: Task
) -> Generator[_Rows | EpisodeError, None, None]:
    """What is in the files, in their order, decoded by threads ahead of what is asked for.

    Threads suffice, because inflating, checksums and digests release the interpreter. Only
    `threads + 1` batches are in memory beside the one that is being written.
    """
    threads = min(len(cores()), _THREADS)
    ahead: collections.deque[Future[list[_Rows | EpisodeError]]] = collections.deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for start in range(0, len(planned), _BATCH):
            ahead.append(pool.submit(_decode, planned[start : start + _BATCH], task))
            if len(ahead) > threads:
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _same(out: Path, index: dict[str, Any]) -> bool:
    try:
        there = EpisodeStore(out).index
    except (StoreError, NotADirectoryError):
        return False
    return all(there[key] == index[key] for key in ("fingerprint", "episodes"))


class _Column:
    """An .npy file that grows by rows; its header is written last, when their number is known."""

    def __init__(self, path: Path, dtype: np.dtype):
        self._dtype, self.width, self._rows = dtype, 1, 0
        self._file: BinaryIO = open(path, "wb")

    def __enter__(self) -> "_Column":
        return self

    def append(self, rows: np.ndarray) -> None:
        if not self._rows:
            self.width = rows.shape[1]
            self._write_header()
        self._file.write(rows.data)
        self._rows += len(rows)

    def __exit__(self, *_: object) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        # NumPy pads headers so that the row count can grow in place.
        descr = np.lib.format.dtype_to_descr(self._dtype)
        shape = (self._rows, self.width)
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)
