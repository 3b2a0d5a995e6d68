"""Work spread over the cores of this machine."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def spread(
    function: Callable[[Item], Result], items: Sequence[Item], processes: int
) -> Iterator[Result]:
    """Results as they become ready, in any order; with one process, computed here and in order.

    The processes are spawned, because JAX may be running here, and forking its threads can hang:
    the calling script needs the usual `if __name__ == "__main__":`.
    """
    if processes == 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        try:
            tasks = [pool.submit(function, item) for item in items]
            yield from (task.result() for task in as_completed(tasks))
        finally:
            pool.shutdown(cancel_futures=True)
