"""Starts the collector that was asked for."""

import logging
import time
from pathlib import Path

from exorl.collect import folder, untrained
from exorl.collect.config import CollectConfig
from exorl.tasks import task as find_task

log = logging.getLogger(__name__)


def collect(config: CollectConfig) -> Path:
    """Collects what is missing of `config.steps` environment steps and returns the folder.

    Episodes already there are kept: call it again after an interruption, or with more steps. With
    several processes, the calling script needs the usual `if __name__ == "__main__":`.

    Raises:
        TaskError: There is no such task.
        FileExistsError: The folder holds episodes of another collection.
        FileNotFoundError: The agent of `supervised` goes on, but an episode before is gone.
    """
    find_task(config.task)
    folder.claim(config)
    started = time.perf_counter()
    if config.method == "supervised":
        from exorl.collect import supervised  # JAX, which the others start without

        made = supervised.collect(config)
    else:
        made = untrained.collect(config)
    log.info(
        "%s, %s, seed %d: %d episodes made in %.1f s, in %s",
        config.task, config.method, config.seed, made, time.perf_counter() - started, config.folder,
    )  # fmt: skip
    return config.folder
