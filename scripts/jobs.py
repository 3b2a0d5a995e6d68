"""Command lines of ours run side by side, one core each."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from queue import SimpleQueue

from exorl import parallel


@dataclass(frozen=True)
class Job:
    """Command lines that run one after the other, beside other jobs."""

    name: str
    commands: tuple[tuple[str, ...], ...]


def module(name: str, *arguments: object) -> tuple[str, ...]:
    """The command line of one of our scripts."""
    return (sys.executable, "-m", f"scripts.{name}", *(str(each) for each in arguments))


def run(jobs: Sequence[Job], at_once: int, logs: Path, compiled: Path) -> None:
    """Run jobs, some at a time, each with a log of its own.

    Args:
        jobs: started in this order.
        at_once: processes at a time, at least 1.
        logs: folder of their output.
        compiled: folder of compiled programs, which agents of one shape share.

    Raises:
        RuntimeError: a command failed; the message ends with the end of its log.
        ValueError: no process at a time.
    """
    if at_once < 1:
        raise ValueError(f"jobs is {at_once}, expected at least 1 process at a time")
    logs.mkdir(parents=True, exist_ok=True)
    # Small networks gain nothing from a second thread of XLA's and pay for it: one core a process.
    # A thread's affinity is inherited by the processes it starts.
    cores: SimpleQueue[int] = SimpleQueue()
    for each in islice(cycle(parallel.cores()), at_once):
        cores.put(each)
    with ThreadPoolExecutor(at_once, initializer=lambda: _bind(cores.get())) as pool:
        for _ in pool.map(lambda job: _run(job, logs, compiled), jobs):
            pass


def _bind(core: int) -> None:
    """Keeps this thread on one core, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


def _run(job: Job, logs: Path, compiled: Path) -> None:
    print(f"{job.name}: started\n", end="", flush=True)
    start = time.perf_counter()
    path = logs / f"{job.name.replace(', ', '-').replace(' ', '-')}.log"
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(compiled)}
    with path.open("w") as output:
        for line in job.commands:
            output.write(f"$ {' '.join(line)}\n")
            output.flush()
            done = subprocess.run(line, stdout=output, stderr=subprocess.STDOUT, env=environment)
            if done.returncode:
                tail = "\n".join(path.read_text().splitlines()[-15:])
                raise RuntimeError(f"{job.name} failed; the end of {path}:\n{tail}")
    print(f"{job.name}: {time.perf_counter() - start:.0f} s\n", end="", flush=True)
