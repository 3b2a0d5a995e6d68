"""The largest buffers of a compiled program and the lines that they come from.

XLA writes down where each value lies (its buffer assignment) and, beside every instruction, the
stack of Python frames that made it. Both are read from the folder that it dumps them into.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
"""Lines of files below it are ours."""

_ALLOCATION = re.compile(r"allocation \d+: size \d+(?:, page \d+)?, (.*)")
_VALUE = re.compile(
    r" value: <\d+ ([\w.-]+)(?:\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
)
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = ")
_METADATA = re.compile(r"metadata=\{([^}]*stack_frame_id[^}]*)\}")
_CALLS = re.compile(r"\bcalls=%?([\w.-]+)")
_TABLE = re.compile(r"(FileNames|FunctionNames|FileLocations|StackFrames)$")
_NUMBER = re.compile(r"(\w+)=(\d+)")
_LAYOUT = re.compile(r"(?<=\])\{[^}]*\}")


@dataclass(frozen=True)
class Buffer:
    """A place in a device's memory and what lies there.

    Attributes:
        size: bytes.
        shape: of the largest value, such as ``f32[1,64000,1024]``.
        values: how many values take turns in it.
        kind: ``temporary``, or ``argument`` or ``output`` of the program.
        operation: what made the value, as JAX calls it.
        line: file, line and function of ours that asked for it; empty if none did.
    """

    size: int
    shape: str
    values: int
    kind: str
    operation: str
    line: str


def largest(dump: Path, count: int = 12) -> list[Buffer]:
    """The largest buffers of the program dumped into a folder, the largest first.

    Values of one size at one place are one buffer. Temporaries overlap where they do not live at
    the same time, so their sizes may add up to more than the program reserves.
    """
    assignments = sorted(dump.glob("*after_optimizations*buffer-assignment.txt"))
    if not assignments:
        return []
    assignment = max(assignments, key=lambda path: path.stat().st_size)
    program = assignment.with_name(assignment.name.replace("-buffer-assignment", ""))
    frames = _Frames(program.read_text())
    places: dict[tuple[str, int, int], list[tuple[str, str]]] = {}
    kind, allocation = "", ""
    for line in assignment.read_text().splitlines():
        if found := _ALLOCATION.match(line):
            allocation, kind = line.partition(":")[0], _kind(found[1])
        elif not line.startswith(" "):
            kind = ""  # what follows the list of allocations
        elif kind and (found := _VALUE.match(line)) and not found[4].startswith("("):
            key = (f"{kind} {allocation}", int(found[2]), int(found[3]))
            places.setdefault(key, []).append((found[1], found[4]))
    chosen = sorted(places, key=lambda key: -key[1])[:count]
    return [_buffer(key, places[key], frames) for key in chosen]


def _kind(words: str) -> str:
    if "parameter" in words:
        return "argument"
    if "live-out" in words:
        return "output"
    return "" if "constant" in words or "thread-local" in words else "temporary"


def _buffer(key: tuple[str, int, int], values: list[tuple[str, str]], frames: "_Frames") -> Buffer:
    origins = [(name, shape, frames.of(name)) for name, shape in values]
    name, shape, origin = next((each for each in origins if each[2].line), origins[0])
    return Buffer(
        size=key[1],
        shape=_LAYOUT.sub("", shape),
        values=len(values),
        kind=key[0].split()[0],
        operation=origin.operation or name,
        line=origin.line,
    )


class _Origin(NamedTuple):
    operation: str
    line: str


class _Frames:
    """The tables of files, functions and frames at the head of a program, and its instructions."""

    def __init__(self, text: str) -> None:
        self._tables: dict[str, dict[int, str]] = {}
        self._metadata: dict[str, str] = {}
        fused: dict[str, str] = {}  # what the last instruction of a computation says
        computation, rows = "", {}
        for line in text.splitlines():
            if table := _TABLE.match(line):
                rows = self._tables[table[1]] = {}
            elif line[:1].isdigit():
                number, _, rest = line.partition(" ")
                rows[int(number)] = rest
            elif opening := _COMPUTATION.match(line):
                computation = opening[1]
            elif found := _INSTRUCTION.match(line):
                metadata, called = _METADATA.search(line), _CALLS.search(line)
                if metadata:
                    self._metadata[found[1]] = fused[computation] = metadata[1]
                elif called and called[1] in fused:
                    self._metadata[found[1]] = fused[called[1]]
        # XLA prints parents counted from 1 with none as 1, so that the first seems its own parent.
        self._shift = self._row("StackFrames", 1).get("parent_frame_id", 0)

    def of(self, instruction: str) -> _Origin:
        """Where an instruction comes from: the innermost frame that is ours."""
        metadata = self._metadata.get(instruction, "")
        operation = re.search(r'op_name="([^"]*)"', metadata)
        frame = int(dict(_NUMBER.findall(metadata)).get("stack_frame_id", 0))
        line = ""
        while frame > 0 and not line:
            place = self._row("StackFrames", frame)
            line = self._line(place.get("file_location_id", 0))
            frame = place.get("parent_frame_id", 0) - self._shift
        return _Origin(operation[1].rpartition("/")[2].strip("()") if operation else "", line)

    def _row(self, table: str, index: int) -> dict[str, int]:
        text = self._tables.get(table, {}).get(index, "")
        return {name: int(number) for name, number in _NUMBER.findall(text)}

    def _line(self, location: int) -> str:
        place = self._row("FileLocations", location)
        path = self._tables.get("FileNames", {}).get(place.get("file_name_id", 0), "").strip('"')
        if not path or not Path(path).is_relative_to(ROOT):
            return ""
        if "site-packages" in Path(path).parts:  # an environment within the checkout
            return ""
        function = self._tables["FunctionNames"].get(place["function_name_id"], "").strip('"')
        function = function.rpartition("<locals>.")[2]
        return f"{Path(path).relative_to(ROOT)}:{place['line']} in {function}"
