"""ExoRL's episode files: one npz an episode, read and written strictly.

A file holds T + 1 rows for T steps. Row 0 is where the episode starts, with an action and a reward
of zeros that never happened. Row t holds the action taken in state t - 1 and what it led to:

    row           0      1       2             T
    observation   s_0    s_1     s_2    ...    s_T
    action        0      a_0     a_1    ...    a_{T-1}
    reward        0      r_0     r_1    ...    r_{T-1}

Discounts are 1 throughout: an episode ends by its time limit, never by failure.
"""

import io
import os
import re
import zipfile
import zlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from exorl.tasks import Task

_NAME = re.compile(r"(?:episode|\d{8}T\d{6})_(?P<index>\d+)_(?P<length>\d+)\.npz")


# What reading a damaged archive raises, depending on where the damage is.
_DAMAGE = (OSError, EOFError, ValueError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error)


class EpisodeError(ValueError):
    """An episode file that can't be used; the message names the file, the key and the fault."""


@dataclass(frozen=True)
class Episode:
    """T steps in T + 1 rows; row 0 is the start, row t what the t-th action led to."""

    observation: np.ndarray  # [T+1, O] float32
    action: np.ndarray  # [T+1, A] float32 in [-1, 1], row 0 zeros
    reward: np.ndarray  # [T+1, 1] float32, of the task collected for, row 0 zero
    discount: np.ndarray  # [T+1, 1] float32
    physics: np.ndarray  # [T+1, P] float64, simulator states

    def __len__(self) -> int:
        """T, the number of steps: one less than there are rows."""
        return len(self.observation) - 1


FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Episode))

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(np.float64 if name == "physics" else np.float32) for name in FIELDS
}


@dataclass(frozen=True)
class EpisodeFile:
    """An episode on disk, as its name describes it."""

    path: Path | zipfile.Path
    index: int
    length: int  # T, steps


def find(source: str | Path) -> list[EpisodeFile]:
    """The episodes in a folder or a zip, by number, not by name.

    Both naming schemes are known: `episode_{index}_{length}.npz`, however padded, and the older
    `{timestamp}_{index}_{length}.npz`. In ExoRL's archives, packed or unpacked, the episodes lie
    in `buffer`.

    Raises:
        EpisodeError: There is no such source, or an npz file in it is named otherwise.
    """
    folder = _opened(Path(source))
    if (folder / "buffer").is_dir():
        folder = folder / "buffer"
    paths = [path for path in folder.iterdir() if _is_npz(path.name)]
    return sorted((describe(path) for path in paths), key=lambda file: (file.index, str(file.path)))


def _opened(source: Path) -> Path | zipfile.Path:
    if source.is_dir():
        return source
    if not source.exists():
        raise EpisodeError(f"{source}: no such folder or zip")
    try:
        return zipfile.Path(source)
    except zipfile.BadZipFile as error:
        raise EpisodeError(f"{source}: neither a folder nor a whole zip ({error})") from error


def _is_npz(name: str) -> bool:
    return name.endswith(".npz") and not name.startswith(".")


def describe(path: str | Path | zipfile.Path) -> EpisodeFile:
    """What the name of an episode file says; `EpisodeError` if it is named otherwise."""
    path = Path(path) if isinstance(path, str) else path
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise EpisodeError(f"{path}: expected a name like episode_000000_1000.npz (number, steps)")
    return EpisodeFile(path, int(match["index"]), int(match["length"]))


def read(path: str | Path | zipfile.Path, task: Task | None = None) -> Episode:
    """The episode in a file, checked against its own name and, if given, a task's sizes.

    Keys beyond ExoRL's five are ignored (some collectors store their skill).

    Raises:
        EpisodeError: The file is damaged, or a field is missing, of the wrong type or shape, or
            not finite.
    """
    file = describe(path)
    try:
        content = io.BytesIO(file.path.read_bytes())
        with np.lib.npyio.NpzFile(content, allow_pickle=False) as arrays:
            missing = [name for name in FIELDS if name not in arrays]
            if missing:
                raise EpisodeError(f"{path}: no {missing[0]!r} in it, only {sorted(arrays)}")
            episode = Episode(**{name: arrays[name] for name in FIELDS})
    except EpisodeError:
        raise
    except _DAMAGE as error:
        raise EpisodeError(
            f"{path}: damaged or not an npz file ({error}); fetch it again"
        ) from error
    check(episode, path, file.length, task)
    return episode


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
    episode: Episode, path: str | Path | zipfile.Path, length: int, task: Task | None = None
) -> None:
    """Refuses an episode that does not have `length` steps of finite numbers, by `EpisodeError`.

    Args:
        episode: What to look at.
        path: Named in the message.
        length: T, at least 1.
        task: Whose sizes the observations, actions and states must have.
    """
    if length < 1:
        raise EpisodeError(f"{path}: an episode of {length} steps, expected at least 1")
    widths: dict[str, int | None] = dict.fromkeys(FIELDS) | {"reward": 1, "discount": 1}
    if task is not None:
        widths["observation"] = task.observation_dim
        widths["action"] = task.action_dim
        widths["physics"] = task.physics_dim
    for name in FIELDS:
        array, width = getattr(episode, name), widths[name]
        if array.dtype != DTYPES[name]:
            raise EpisodeError(f"{path}: {name} is {array.dtype}, expected {DTYPES[name]}")
        if array.ndim != 2 or len(array) != length + 1 or width not in (None, array.shape[1]):
            expected = f"({length + 1}, {'any' if width is None else width})"
            raise EpisodeError(
                f"{path}: {name} has shape {array.shape}, expected {expected}"
                + (f" for {task.name}" if task else "")
            )
        if not np.isfinite(array).all():
            row = int(np.flatnonzero(~np.isfinite(array).all(axis=1))[0])
            raise EpisodeError(f"{path}: {name} is not finite in row {row}")
