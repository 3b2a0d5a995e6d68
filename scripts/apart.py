"""Work in a process of its own, for compilers whose failed checks end the process that asks."""

import multiprocessing
import signal
from collections.abc import Callable
from typing import Any


def run(function: Callable[..., object], *arguments: Any) -> int:
    """Exit status of a new process that calls a function: −N if signal N ended it.

    The process shares nothing with this one; function and arguments are pickled, and the function
    is one of a module.
    """
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def name(status: int) -> str:
    """Of the signal that ended a process."""
    return signal.Signals(-status).name
