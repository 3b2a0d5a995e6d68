"""Rewards of any task of a store's domain, recomputed once and cached beside the store."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from exorl.paths import write_whole
from exorl.rewards import FORMULA_VERSION, Mode, reward
from exorl.store import EpisodeStore, StoreError
from exorl.tasks import task as find_task

# Rows relabelled at a time: bounds memory to some hundred megabytes in any domain.
_CHUNK = 1 << 17

# The fields that rewards are functions of, as `exorl.rewards.reward` takes them.
_READ = ("observation", "action", "physics")


def rewards(store: EpisodeStore, task: str, mode: Mode = "exact") -> np.ndarray:
    """Rewards `[rows]` float32 of a task for all rows of a store, mapped read-only.

    Row 0 of an episode earns nothing (upstream gives it a reward too, but never draws it).
    Computed at the first call, then read from `rewards/` in the store's folder. A cache counts
    only if it was made from the same content, by the same formulas, in the same mode.

    Raises:
        TaskError: There is no such task.
        StoreError: The task is of another domain than the store.
    """
    domain = find_task(task).domain
    if domain != store.domain:
        raise StoreError(f"{store.path}: holds {store.domain} episodes, {task} is of {domain}")
    key = _key(store, task, mode)
    name = f"{task}-{mode}-v{FORMULA_VERSION}-{store.fingerprint}"
    path = store.path / "rewards" / f"{name}.npy"
    if _sidecar(path) != key:
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)
        _write(path, store, task, mode)
        write_whole(path.with_suffix(".json"), json.dumps(key, indent=1).encode())
    return np.load(path, mmap_mode="r")


def returns(store: EpisodeStore, task: str, mode: Mode = "exact") -> np.ndarray:
    """Returns `[N]` float64 of a task: each episode's sum over its T steps, rows 1 to T."""
    first, end = store.offsets[:-1] + 1, store.offsets[1:]
    # Every other stretch is one between episodes, a single row 0 that does not count.
    stretches = np.stack([first, end], axis=1).ravel()[:-1]
    return np.add.reduceat(rewards(store, task, mode), stretches, dtype=np.float64)[::2]


def _key(store: EpisodeStore, task: str, mode: Mode) -> dict[str, Any]:
    # The fingerprint tells stores apart; sizes and times catch files changed by hand since.
    stats = {name: os.stat(store.path / f"{name}.npy") for name in _READ}
    return {
        "fingerprint": store.fingerprint,
        "task": task,
        "mode": mode,
        "formula_version": FORMULA_VERSION,
        "arrays": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
    }


def _sidecar(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.with_suffix(".json").read_text()) if path.exists() else None
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _write(path: Path, store: EpisodeStore, task: str, mode: Mode) -> None:
    rows = int(store.offsets[-1])
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        out = np.lib.format.open_memmap(partial, "w+", np.float32, (rows,))
        for start in range(0, rows, _CHUNK):
            part = slice(start, start + _CHUNK)
            fields = (store.field(name)[part] for name in _READ)
            out[part] = reward(task, *fields, mode=mode)
        out[store.offsets[:-1]] = 0
        out.flush()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
