"""Several processes, each with devices of its own, that are one run: who they are, how they end."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

_COUNTS = ("JAX_NUM_PROCESSES", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
_LOST = ("Connection closed by peer", "Connection reset by peer", "heartbeat", "unavailable")


class LostProcess(RuntimeError):
    """Another process of the run has ended, so this one cannot go on."""


def join() -> None:
    """Find the other processes of this run, if it was started as several; before JAX is used.

    SLURM, Open MPI and TPU pods say so in their environment, which JAX reads. Anything else sets
    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Raises:
        ValueError: only some of these three are set.
    """
    counts = [int(os.environ[name]) for name in _COUNTS if name in os.environ]
    pod = "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
    if jax.distributed.is_initialized() or not (pod or any(count > 1 for count in counts)):
        return
    if "JAX_NUM_PROCESSES" not in os.environ:
        jax.distributed.initialize()
        return
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} must be set as well: a run of several processes is told "
            f"{names[0]} (host:port of process 0), {names[1]} and {names[2]} (from 0)"
        )
    address, count, index = (os.environ[name] for name in names)
    jax.distributed.initialize(address, int(count), int(index))


def is_first() -> bool:
    """Whether this process writes logs, metrics and configs."""
    return jax.process_index() == 0


def agreed(values: np.ndarray) -> np.ndarray:
    """What the first process says, in all of them."""
    if jax.process_count() == 1:
        return values
    return np.asarray(multihost_utils.broadcast_one_to_all(values))


def lost(error: Exception) -> LostProcess | None:
    """What an error of a collective means, if it means that another process is gone."""
    if jax.process_count() == 1 or not any(sign in str(error) for sign in _LOST):
        return None
    return LostProcess(
        f"process {jax.process_index()} of {jax.process_count()} stops, because another process of "
        f"the run is gone: see its output for the reason. Start all of them again to resume from "
        f"the newest checkpoint ({str(error).splitlines()[0][:200]})"
    )


class StopRequest:
    """Turns SIGTERM and SIGINT into a question that the training loop asks after every step.

    With several processes JAX listens for SIGTERM and lets all stop at the same step; SIGINT is
    handed on to it.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                if jax.process_count() == 1 or number == signal.SIGINT:
                    self._previous[number] = signal.signal(number, self._receive)
        except ValueError:  # not in the main thread, where signals are the caller's business
            pass
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:  # asked twice: at once
            raise KeyboardInterrupt
        self._received = number
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def at(self, step: int) -> bool:
        """Whether to stop after this step; the same answer in all processes."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received is not None
