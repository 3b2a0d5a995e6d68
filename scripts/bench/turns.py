"""Side-by-side timing: calls take turns, so that whatever else the machine does hits all alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")


class Seconds(NamedTuple):
    """Medians of a call: on the clock, and of all the process's cores together."""

    wall: float
    cpu: float


def medians(calls: Mapping[Key, Callable[[], object]], repeats: int) -> dict[Key, Seconds]:
    """What each call takes, over `repeats` turns after one that does not count."""
    for call in calls.values():
        call()
    taken: dict[Key, list[tuple[float, float]]] = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            taken[key].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        key: Seconds(*(statistics.median(part) for part in zip(*times, strict=True)))
        for key, times in taken.items()
    }
