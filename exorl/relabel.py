"""Rewards of any task of a store's domain, recomputed once and cached beside the store."""

import functools
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from exorl.parallel import cores, spread
from exorl.paths import write_whole
from exorl.rewards import FORMULA_VERSION, Backend, Mode, reward
from exorl.store import EpisodeStore, StoreError
from exorl.tasks import task as find_task

# Rows relabelled at a time: bounds memory to some hundred megabytes in any domain.
_CHUNK = 1 << 17

# The fields that rewards are functions of, as `exorl.rewards.reward` takes them.
_READ = ("observation", "action", "physics")


def rewards(
    store: EpisodeStore, task: str, mode: Mode = "exact", backend: Backend = "closed_form"
) -> np.ndarray:
    """Rewards `[rows]` float32 of a task for all rows of a store, mapped read-only.

    Row 0 of an episode earns nothing (upstream gives it a reward too, but never draws it).
    Computed at the first call, then read from `rewards/` in the store's folder. A cache counts
    only if it was made from the same content, by the same formulas, in the same mode. With
    another back-end than the closed form, all cores work.

    Raises:
        TaskError: There is no such task.
        StoreError: The task is of another domain than the store.
    """
    domain = find_task(task).domain
    if domain != store.domain:
        raise StoreError(f"{store.path}: holds {store.domain} episodes, {task} is of {domain}")
    key = _key(store, task, mode, backend)
    name = f"{task}-{mode}-{backend}-v{FORMULA_VERSION}-{store.fingerprint}"
    path = store.path / "rewards" / f"{name}.npy"
    if _sidecar(path) != key:
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)
        _write(path, store, task, mode, backend)
        write_whole(path.with_suffix(".json"), json.dumps(key, indent=1).encode())
    return np.load(path, mmap_mode="r")


def returns(
    store: EpisodeStore, task: str, mode: Mode = "exact", backend: Backend = "closed_form"
) -> np.ndarray:
    """Returns `[N]` float64 of a task: each episode's sum over its T steps, rows 1 to T."""
    first, end = store.offsets[:-1] + 1, store.offsets[1:]
    # Every other stretch is one between episodes, a single row 0 that does not count.
    stretches = np.stack([first, end], axis=1).ravel()[:-1]
    earned = rewards(store, task, mode, backend)
    return np.add.reduceat(earned, stretches, dtype=np.float64)[::2]


def _key(store: EpisodeStore, task: str, mode: Mode, backend: Backend) -> dict[str, Any]:
    # The fingerprint tells stores apart; sizes and times catch files changed by hand since.
    stats = {name: os.stat(store.path / f"{name}.npy") for name in _READ}
    return {
        "fingerprint": store.fingerprint,
        "task": task,
        "mode": mode,
        "backend": backend,
        "formula_version": FORMULA_VERSION,
        "arrays": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
    }


def _sidecar(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.with_suffix(".json").read_text()) if path.exists() else None
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _write(path: Path, store: EpisodeStore, task: str, mode: Mode, backend: Backend) -> None:
    rows = int(store.offsets[-1])
    processes, size = 1, _CHUNK
    if backend != "closed_form":
        processes = len(cores())
        size = min(_CHUNK, math.ceil(rows / processes))
    parts = [slice(start, start + size) for start in range(0, rows, size)]
    compute = functools.partial(_rewards_of, store.path, task, mode, backend)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        out = np.lib.format.open_memmap(partial, "w+", np.float32, (rows,))
        for part, values in spread(compute, parts, min(processes, len(parts))):
            out[part] = values
        out[store.offsets[:-1]] = 0
        out.flush()
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _rewards_of(
    store: Path, task: str, mode: Mode, backend: Backend, part: slice
) -> tuple[slice, np.ndarray]:
    fields = (np.load(store / f"{name}.npy", mmap_mode="r")[part] for name in _READ)
    return part, reward(task, *fields, mode=mode, backend=backend)
