"""Packed episodes: one memory-mapped array per field, read without copying.

A store is a folder:

    observation.npy  action.npy  reward.npy  discount.npy  physics.npy
                     all rows of all episodes, one after the other (see `exorl.episodes`)
    offsets.npy      int64 [N+1]: episode i is rows offsets[i] to offsets[i+1]
    index.json       domain, where each episode came from, and what identifies the content
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from exorl.episodes import FIELDS, Episode

SCHEMA = 1


class StoreError(ValueError):
    """A store that can't be read or written; the message names the folder and the fault."""


class EpisodeStore:
    """Episodes packed by `exorl.pack`.

    `store[i]` is an `Episode` of views into mapped, read-only files.

    Attributes:
        path: The store's folder.
        index: What `index.json` holds: `schema`, `domain`, `fingerprint`, `versions` of the
            libraries, `sources` (collector name to folder), the `selection` from each, `skipped`
            files with the reason, and `episodes`, for each its `collector`, `episode` number
            there, `file` and `digest`.
        offsets: int64 [N+1], the rows where episodes begin and, last, how many rows there are.
    """

    def __init__(self, path: str | Path):
        """Opens a store; `StoreError` if it is incomplete or of another schema."""
        self.path = Path(path)
        try:
            self.index: dict[str, Any] = json.loads((self.path / "index.json").read_text())
        except FileNotFoundError:
            raise StoreError(f"{path}: no store here (no index.json); pack one first") from None
        except json.JSONDecodeError as error:
            raise StoreError(f"{self.path / 'index.json'}: damaged ({error})") from error
        if self.index.get("schema") != SCHEMA:
            found = self.index.get("schema")
            raise StoreError(f"{path}: schema {found}, expected {SCHEMA}; pack it again")
        self.offsets: np.ndarray = np.array(self._open("offsets"))
        self._fields = {name: self._open(name) for name in FIELDS}
        rows = int(self.offsets[-1])
        if len(self) != len(self.index["episodes"]):
            raise StoreError(f"{path}: offsets.npy and index.json disagree on how many episodes")
        for name, array in self._fields.items():
            if len(array) != rows:
                raise StoreError(f"{path}: {name}.npy has {len(array)} rows, expected {rows}")

    @property
    def domain(self) -> str:
        """The domain that all episodes are from."""
        return self.index["domain"]

    @property
    def fingerprint(self) -> str:
        """Identifies the content: equal for equal episodes in equal order, wherever they lie."""
        return self.index["fingerprint"]

    def field(self, name: str) -> np.memmap:
        """All rows of one field, `[rows, D]`, mapped read-only."""
        return self._fields[name]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Episode:
        if not -len(self) <= i < len(self):
            raise IndexError(f"{self.path}: episode {i} of {len(self)}")
        i %= len(self)
        rows = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return Episode(**{name: np.asarray(self._fields[name])[rows] for name in FIELDS})

    def _open(self, name: str) -> np.memmap:
        try:
            return np.load(self.path / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise StoreError(f"{self.path / name}.npy: {error}; pack the store again") from error


def digest(*parts: str | np.ndarray) -> str:
    """What identifies texts and contiguous arrays: an episode by its fields, in their order."""
    content = hashlib.blake2b(digest_size=16)
    for part in parts:
        content.update(part.encode() if isinstance(part, str) else part.data)
    return content.hexdigest()
