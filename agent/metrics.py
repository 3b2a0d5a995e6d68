"""Metrics of a run: one JSON line a record (the source of truth) and TensorBoard events."""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from agent import processes
from exorl.paths import write_whole


class MetricsWriter:
    """Appends to ``metrics.jsonl`` and an event file in a run's folder, in one process only.

    What a run that was killed had recorded after the ``step`` that it goes on from is dropped.
    """

    def __init__(self, run: Path, step: int) -> None:
        self._writes = processes.is_first()
        if not self._writes:
            return
        run.mkdir(parents=True, exist_ok=True)
        path = run / "metrics.jsonl"
        _drop_after(path, step)
        self._lines = path.open("a", buffering=1)
        self._events = EventFileWriter(str(run))
        # TensorBoard forgets what older files have from this step on.
        start = SessionLog(status=SessionLog.START)
        self._events.add_event(Event(step=step + 1, wall_time=time.time(), session_log=start))

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record scalars at a step."""
        if not self._writes:
            return
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
        if self._writes:
            self._lines.close()
            self._events.close()


def _drop_after(path: Path, step: int) -> None:
    """Keep a file's whole lines up to a step; a killed process may have left half of one."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    write_whole(path, "".join(kept).encode())
