"""Cells of a table that take minutes each: kept in a CSV as they are finished, never made twice."""

import csv
import dataclasses
import datetime
import io
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax

import ring
from agent import estimate
from agent.config import TrainConfig
from agent.plan import available, mesh_of, plan
from exorl.paths import write_whole
from ring import targets
from scripts import apart
from scripts.command import versions


class Key(NamedTuple):
    """What a cell is about."""

    table: str
    model: str
    target: str
    memory: str
    ring: int
    tokens: int  # of a sequence


@dataclass(frozen=True)
class Cell:
    """One compiled training step. Bytes are those of a device.

    Attributes:
        key: what was compiled.
        total: bytes that the step needs; None if the compiler refused and did not say.
        available: bytes that a device has for it.
        temporaries: bytes that the program reserves; None if it was refused.
        counted: bytes by count, see `agent.estimate`.
        measured: bytes seen in use when it ran; None if it did not run.
        seconds: of processor time to trace and compile, or of the clock for a step that ran.
        compiler: names and versions.
        date: day it was compiled.
        aborted: signal that ended the compiler, which then says nothing of the cell; "" if none.
    """

    key: Key
    total: int | None
    available: int
    temporaries: int | None
    counted: int
    measured: int | None
    seconds: float
    compiler: str
    date: str
    aborted: str = ""

    @property
    def fits(self) -> bool | None:
        """Whether the device has room; None if the compiler was aborted."""
        if self.aborted:
            return None
        return self.temporaries is not None and (self.total or 0) <= self.available


class Cells:
    """All cells of a CSV, read whenever they are asked for; every one added is on disk at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Cell]:
        """In order of their keys."""
        return iter(sorted(_read(self.path).values(), key=lambda cell: cell.key))

    def get(self, key: Key) -> Cell | None:
        """The cell, if it is finished."""
        return _read(self.path).get(key)

    def add(self, cell: Cell) -> None:
        """Keep a cell, in the place of one of the same key; the file is replaced whole."""
        cells = {**_read(self.path), cell.key: cell}
        names = [*Key._fields, *(f.name for f in dataclasses.fields(Cell) if f.name != "key")]
        text = io.StringIO()
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        for each in sorted(cells.values(), key=lambda cell: cell.key):
            rest = {name: getattr(each, name) for name in names if name not in Key._fields}
            writer.writerow({**each.key._asdict(), **rest})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, text.getvalue().encode())


def _read(path: Path) -> dict[Key, Cell]:
    if not path.exists():
        return {}
    with path.open(newline="") as lines:
        return {cell.key: cell for cell in map(_cell, csv.DictReader(lines))}


def _cell(row: dict[str, str]) -> Cell:
    def whole(name: str) -> int | None:
        return int(row[name]) if row[name] else None

    key = Key(
        *(row[name] for name in ("table", "model", "target", "memory")),
        ring=int(row["ring"]),
        tokens=int(row["tokens"]),
    )
    return Cell(
        key=key,
        total=whole("total"),
        available=int(row["available"]),
        temporaries=whole("temporaries"),
        counted=int(row["counted"]),
        measured=whole("measured"),
        seconds=float(row["seconds"]),
        compiler=row["compiler"],
        date=row["date"],
        aborted=row["aborted"],
    )


@dataclass(frozen=True)
class Series:
    """Steps of one run that differ in the length of their sequences.

    Attributes:
        table: that the cells are for.
        model: what the table calls it.
        config: of the run.
        target: to compile for, as many devices as the run's mesh has.
    """

    table: str
    model: str
    config: TrainConfig
    target: str

    def key(self, tokens: int) -> Key:
        """Of the cell for sequences of so many tokens."""
        memory, size = self.config.model.memory, self.config.mesh.ring
        return Key(self.table, self.model, self.target, memory, size, tokens)

    def shape(self, tokens: int) -> tuple[int, int]:
        """B and S of a batch: one sequence for each data × fsdp shard."""
        rows = self.config.mesh.data * self.config.mesh.fsdp
        return rows, tokens // self.config.tokens_per_step

    def expected(self, sizes: Sequence[int]) -> int:
        """Index of the largest of ascending sizes that fits by count, 0 if none does."""
        target = targets.parse(self.target)
        mesh, most = mesh_of(self.config, target), available(target)
        fitting = [
            at
            for at, tokens in enumerate(sizes)
            if estimate.bytes_of(self.config, mesh, *self.shape(tokens)).total <= most
        ]
        return fitting[-1] if fitting else 0


def compiled(series: Series, tokens: int) -> Cell:
    """Compile the cell for sequences of so many tokens."""
    start = time.process_time()
    target = targets.parse(series.target)
    made = plan(series.config, target, shape=series.shape(tokens))
    return Cell(
        key=series.key(tokens),
        total=made.total,
        available=made.available,
        temporaries=getattr(made.program, "temporaries", None),
        counted=made.counted.total,
        measured=None,
        seconds=round(time.process_time() - start, 1),
        compiler=versions("jax", target.compiler),
        date=datetime.date.today().isoformat(),
    )


def fill(cells: Cells, series: Series, tokens: int) -> None:
    """Compile a cell, in a process of its own, and keep it; or keep that the compiler was aborted.

    Raises:
        RuntimeError: the process failed otherwise.
    """
    start = time.monotonic()
    status = apart.run(_fill, cells, series, tokens)
    if status not in (0, -signal.SIGABRT, -signal.SIGSEGV):
        raise RuntimeError(f"compiling {series.key(tokens)} ended with exit status {status}")
    if status:
        target = targets.parse(series.target)
        counted = estimate.bytes_of(
            series.config, mesh_of(series.config, target), *series.shape(tokens)
        )
        cell = Cell(
            key=series.key(tokens),
            total=None,
            available=available(target),
            temporaries=None,
            counted=counted.total,
            measured=None,
            seconds=round(time.monotonic() - start, 1),
            compiler=versions("jax", target.compiler),
            date=datetime.date.today().isoformat(),
            aborted=apart.name(status),
        )
        cells.add(cell)


def _fill(cells: Cells, series: Series, tokens: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    ring.simulate_devices(targets.parse(series.target).size)
    cells.add(compiled(series, tokens))


class OutOfTime(Exception):
    """No more cells are to be begun."""


class Bench:
    """Finished cells, and what finishes more."""

    def __init__(self, cells: Cells, minutes: float) -> None:
        self.cells, self._until = cells, time.monotonic() + 60 * minutes

    @property
    def out_of_time(self) -> bool:
        """Whether no more cells are to be begun."""
        return time.monotonic() > self._until

    def cell(self, series: Series, tokens: int) -> Cell:
        """The finished cell, or compile it.

        Raises:
            OutOfTime: it would have to be begun too late.
        """
        key = series.key(tokens)
        if found := self.cells.get(key):
            return found
        if self.out_of_time:
            raise OutOfTime
        fill(self.cells, series, tokens)
        cell = self.cells.get(key)
        assert cell is not None
        verdict = cell.aborted or ("FITS" if cell.fits else "OOM")
        total = "" if cell.total is None else f"{cell.total / 2**30:9.2f} GiB"
        words = f"{cell.available / 2**30:.2f}  {' '.join(map(str, key))}  ({cell.seconds:.0f} s)"
        print(f"{verdict:7} {total:13} of {words}", flush=True)
        return cell

    def boundary(self, series: Series, sizes: Sequence[int], first: int | None = None) -> int:
        """Index of the largest of ascending sizes that fits, −1 if none does.

        Sizes are compiled from where the boundary is expected (or from `first`) up to it or down
        to it; that smaller ones than one that fits do too, and larger ones than one that does not
        do not, is taken for granted. Where the compiler is aborted the search ends.
        """
        at = series.expected(sizes) if first is None else first
        fits = self.cell(series, sizes[at]).fits
        if fits:
            while at + 1 < len(sizes) and self.cell(series, sizes[at + 1]).fits:
                at += 1
        while at and fits is False:
            at -= 1
            fits = self.cell(series, sizes[at]).fits
        return at if fits else -1
