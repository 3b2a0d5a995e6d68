"""Starts the collector that was asked for, or several at once."""

import logging
import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from exorl.collect import folder, untrained
from exorl.collect.config import CollectConfig
from exorl.tasks import task as find_task

log = logging.getLogger(__name__)


def collect(config: CollectConfig, line: int = 0) -> Path:
    """Collects what is missing of `config.steps` environment steps and returns the folder.

    Episodes already there are kept: call it again after an interruption, or with more steps. With
    several processes, the calling script needs the usual `if __name__ == "__main__":`.

    Args:
        config: What to collect.
        line: Of the progress bar on the terminal, below where the cursor is.

    Raises:
        TaskError: There is no such task.
        ValueError: There is no such core.
        FileExistsError: The folder holds episodes of another collection.
        FileNotFoundError: The agent of `supervised` goes on, but an episode before is gone.
    """
    find_task(config.task)
    if config.core is not None:
        _bind(config.core)
    folder.claim(config)
    started = time.perf_counter()
    if config.method == "supervised":
        from exorl.collect import supervised  # JAX, which the others start without

        made = supervised.collect(config, line)
    else:
        made = untrained.collect(config, line)
    log.info(
        "%s, %s, seed %d: %d episodes made in %.1f s, in %s",
        config.task, config.method, config.seed, made, time.perf_counter() - started, config.folder,
    )  # fmt: skip
    return config.folder


def collect_side_by_side(configs: Sequence[CollectConfig]) -> list[Path]:
    """Runs several `supervised` collections at once, each process bound to a core of its own.

    Raises what `collect` raises. The calling script needs `if __name__ == "__main__":`.
    """
    cores = untrained.cores()
    processes = min(len(cores), len(configs))
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    for core in cores[:processes]:
        queue.put(core)
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_bind_to_next, initargs=(queue,)
    ) as pool:
        folders = []
        for path in pool.map(collect, configs, range(len(configs))):
            log.info("collected %s", path)
            folders.append(path)
        return folders


def _bind_to_next(cores: "SimpleQueue[int]") -> None:
    if hasattr(os, "sched_setaffinity"):
        _bind(cores.get())


def _bind(core: int) -> None:
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("core: this system does not let a process choose its cores")
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        raise ValueError(f"core is {core}, expected one of {untrained.cores()}") from error
