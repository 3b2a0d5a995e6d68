"""ExoRL's episode files: one npz an episode, read and written strictly.

A file holds T + 1 rows for T steps. Row 0 is where the episode starts, with an action and a reward
of zeros that never happened. Row t holds the action taken in state t - 1 and what it led to:

    row           0      1       2             T
    observation   s_0    s_1     s_2    ...    s_T
    action        0      a_0     a_1    ...    a_{T-1}
    reward        0      r_0     r_1    ...    r_{T-1}

Discounts are 1 throughout: an episode ends by its time limit, never by failure.
"""

import functools
import io
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np

from exorl.tasks import Task

_NAME = re.compile(r"(?:episode|\d{8}T\d{6})_(?P<index>\d+)_(?P<length>\d+)\.npz")

# More than any field of a real episode.
_MAX_RESERVED = 1 << 24

# What reading a damaged archive raises, depending on where the damage is.
_DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
)


class EpisodeError(ValueError):
    """An episode file that can't be used; the message names the file, the key and the fault."""


@dataclass(frozen=True)
class Episode:
    """T steps in T + 1 rows; row 0 is the start, row t what the t-th action led to."""

    observation: np.ndarray  # [T+1, O] float32
    action: np.ndarray  # [T+1, A] float32 in [-1, 1], row 0 zeros
    reward: np.ndarray  # [T+1, 1 or 4] float32, recorded (see REWARD_WIDTHS), row 0 zero
    discount: np.ndarray  # [T+1, 1] float32
    physics: np.ndarray  # [T+1, P] float64, simulator states

    def __len__(self) -> int:
        """T, the number of steps: one less than there are rows."""
        return len(self.observation) - 1


FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Episode))

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(np.float64 if name == "physics" else np.float32) for name in FIELDS
}


# One task's reward, or, in the published episodes of the maze, those of all its four goals.
REWARD_WIDTHS = (1, 4)


@dataclass(frozen=True)
class Zipped:
    """A member of a zip. Every reading opens the zip anew, so any number of threads may read."""

    archive: Path
    info: zipfile.ZipInfo

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.info.filename.rpartition("/")[2]

    def read_bytes(self) -> bytes:
        """Its content, inflated and checked against its checksum."""
        with open(self.archive, "rb") as file:
            return _inflate(file, self.info)

    def __str__(self) -> str:
        return f"{self.archive}/{self.info.filename}"


@dataclass(frozen=True)
class EpisodeFile:
    """An episode on disk, as its name describes it."""

    path: Path | Zipped
    index: int
    length: int  # T, steps


def find(source: str | Path) -> list[EpisodeFile]:
    """The episodes in a folder or a zip, by number, not by name.

    Both naming schemes are known: `episode_{index}_{length}.npz`, however padded, and the older
    `{timestamp}_{index}_{length}.npz`. In ExoRL's archives the episodes lie in `buffer`, unpacked
    in the folder itself, in a zip at any depth.

    Raises:
        EpisodeError: There is no such source, or an npz file in it is named otherwise.
    """
    source = Path(source)
    paths = [path for path in _listed(source) if _is_npz(path.name)]
    return sorted((describe(path) for path in paths), key=lambda file: (file.index, str(file.path)))


def _listed(source: Path) -> Iterable[Path | Zipped]:
    if source.is_dir():
        return (source / "buffer" if (source / "buffer").is_dir() else source).iterdir()
    if not source.exists():
        raise EpisodeError(f"{source}: no such folder or zip")
    try:
        with zipfile.ZipFile(source) as archive:
            members = archive.infolist()
    except zipfile.BadZipFile as error:
        raise EpisodeError(f"{source}: neither a folder nor a whole zip ({error})") from error
    folders = {info.filename.rpartition("/")[0] for info in members}
    # Likewise `exorl.download`.
    buffers = {folder for folder in folders if folder.rpartition("/")[2] == "buffer"} or {""}
    return [Zipped(source, info) for info in members if info.filename.rpartition("/")[0] in buffers]


def _is_npz(name: str) -> bool:
    return name.endswith(".npz") and not name.startswith(".")


def describe(path: str | Path | Zipped) -> EpisodeFile:
    """What the name of an episode file says; `EpisodeError` if it is named otherwise."""
    path = Path(path) if isinstance(path, str) else path
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise EpisodeError(f"{path}: expected a name like episode_000000_1000.npz (number, steps)")
    return EpisodeFile(path, int(match["index"]), int(match["length"]))


def read(path: str | Path | Zipped, task: Task | None = None) -> Episode:
    """The episode in a file, checked against its own name and, if given, a task's sizes.

    Keys beyond ExoRL's five are ignored (some collectors store their skill). Threads may read
    at the same time, also out of one zip.

    Raises:
        EpisodeError: The file is damaged, or a field is missing, of the wrong type or shape, or
            not finite.
    """
    file = describe(path)
    try:
        content = io.BytesIO(file.path.read_bytes())
        with zipfile.ZipFile(content) as archive:
            there = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        missing = [name for name in FIELDS if name not in there]
        if missing:
            raise EpisodeError(f"{path}: no {missing[0]!r} in it, only {sorted(there)}")
        members = {name: _inflate(content, there[name]) for name in FIELDS}
        episode = Episode(**{name: _array(member) for name, member in members.items()})
    except EpisodeError:
        raise
    except _DAMAGE as error:
        raise EpisodeError(
            f"{path}: damaged or not an npz file ({error}); fetch it again"
        ) from error
    check(episode, path, file.length, task)
    return episode


def _inflate(file: BinaryIO, info: zipfile.ZipInfo) -> bytes:
    """A member of a zip in one piece.

    `zipfile` inflates into many small pieces and joins them, which takes a quarter as long again
    and keeps other threads waiting.
    """
    if info.compress_type not in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        with zipfile.ZipFile(file) as archive:
            return archive.read(info)
    # A member begins with 30 bytes, the last four of them the lengths of two fields that follow.
    file.seek(info.header_offset)
    name, extra = struct.unpack_from("<2H", file.read(30), 26)
    file.seek(name + extra, io.SEEK_CUR)
    content = file.read(info.compress_size)
    if info.compress_type == zipfile.ZIP_DEFLATED:
        # The length may be damaged itself, so it must not reserve any amount of memory.
        content = zlib.decompress(content, -zlib.MAX_WBITS, min(info.file_size, _MAX_RESERVED))
    if zlib.crc32(content) != info.CRC:
        raise zipfile.BadZipFile(f"wrong checksum of {info.filename}")
    return content


def _array(member: bytes) -> np.ndarray:
    """The array in an .npy file's bytes, as a read-only view of them."""
    if member[6:8] != b"\x01\x00":  # not the version NumPy writes
        return np.lib.format.read_array(io.BytesIO(member), allow_pickle=False)
    start = 10 + int.from_bytes(member[8:10], "little")
    shape, fortran_order, dtype = _parse_header(member[:start])
    if math.prod(shape) * dtype.itemsize != len(member) - start:
        raise ValueError(f"{len(member) - start} bytes do not make {dtype} of shape {shape}")
    flat = np.frombuffer(member, dtype, offset=start)
    return flat.reshape(shape, order="F" if fortran_order else "C")


@functools.lru_cache(maxsize=64)
def _parse_header(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, Fortran order and type; few headers differ, and NumPy parses them as Python."""
    file = io.BytesIO(header)
    np.lib.format.read_magic(file)
    return np.lib.format.read_array_header_1_0(file)


def write(folder: str | Path, index: int, episode: Episode) -> Path:
    """Writes `episode_{index}_{T}.npz` into a folder, whole or not at all, and returns its path.

    Raises:
        EpisodeError: `read` would not accept it.
    """
    path = Path(folder) / f"episode_{index:06d}_{len(episode)}.npz"
    check(episode, path, len(episode))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            np.savez_compressed(file, **{name: getattr(episode, name) for name in FIELDS})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def check(
    episode: Episode, path: str | Path | Zipped, length: int, task: Task | None = None
) -> None:
    """Refuses an episode that does not have `length` steps of finite numbers, by `EpisodeError`.

    Args:
        episode: What to look at.
        path: Named in the message.
        length: T, at least 1.
        task: Whose sizes the observations, actions and states must have, and whose length no
            episode exceeds.
    """
    if length < 1:
        raise EpisodeError(f"{path}: an episode of {length} steps, expected at least 1")
    if task is not None and length > task.episode_length:
        raise EpisodeError(
            f"{path}: an episode of {length} steps, expected at most {task.episode_length}, where "
            f"those of {task.name} end"
        )
    widths: dict[str, tuple[int, ...]] = {"reward": REWARD_WIDTHS, "discount": (1,)}
    if task is not None:
        widths["observation"] = (task.observation_dim,)
        widths["action"] = (task.action_dim,)
        widths["physics"] = (task.physics_dim,)
        if task.domain != "point_mass_maze":
            widths["reward"] = (1,)
    for name in FIELDS:
        array, fitting = getattr(episode, name), widths.get(name)
        if array.dtype != DTYPES[name]:
            raise EpisodeError(f"{path}: {name} is {array.dtype}, expected {DTYPES[name]}")
        if (
            array.ndim != 2
            or len(array) != length + 1
            or (fitting and array.shape[1] not in fitting)
        ):
            expected = f"({length + 1}, {' or '.join(map(str, fitting or ['any']))})"
            raise EpisodeError(
                f"{path}: {name} has shape {array.shape}, expected {expected}"
                + (f" for {task.name}" if task else "")
            )
        if not np.isfinite(array).all():
            row = int(np.flatnonzero(~np.isfinite(array).all(axis=1))[0])
            raise EpisodeError(f"{path}: {name} is not finite in row {row}")
