"""Side-by-side timing: calls take turns, so that whatever else the machine does hits all alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Key = TypeVar("Key")


def medians(calls: Mapping[Key, Callable[[], object]], repeats: int) -> dict[Key, float]:
    """Median seconds of each call over `repeats` turns, after one that does not count."""
    for call in calls.values():
        call()
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[key].append(time.perf_counter() - start)
    return {key: statistics.median(times) for key, times in seconds.items()}
