"""Metrics of a run: one JSON line a record (the source of truth) and TensorBoard events."""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class MetricsWriter:
    """Appends to ``metrics.jsonl`` and an event file in a run's folder."""

    def __init__(self, run: Path) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self._lines = (run / "metrics.jsonl").open("a", buffering=1)
        self._events = EventFileWriter(str(run))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record scalars at a step."""
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._events.add_event(
            Event(step=step, wall_time=time.time(), summary=Summary(value=scalars))
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lines.close()
        self._events.close()
