"""What a compiled program does while its messages travel, read from the text of the program.

A compiler that overlaps communication with compute splits a permute into a start and a done and
schedules work between the two. The text of a compiled program lists the instructions of each
computation in the order in which they run, so what stands between is what hides the message.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# "%name (parameters) -> shape {" opens a computation; "%name = shape opcode(rest" is an
# instruction, whose shape ends in a bracket of some kind.
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?[\])}]) ([a-z][a-z-]*)\((.*)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
    r"|\bbranch_computations=\{([^}]*)\}"
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
# XLA:TPU writes products of matrices as convolutions; XLA:GPU hands some of them to libraries.
_LIBRARY_PRODUCT = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul)')

_KINDS = ("collective-permute", "all-gather", "all-reduce", "reduce-scatter", "all-to-all")
_FUSED_START = "async-collective-start"  # XLA:TPU puts gathers and reductions into fusions


class Collective(NamedTuple):
    """One collective operation of a compiled program, and what runs while it is under way.

    What runs is counted in the text of the program: a loop, and a product inside it, once, however
    often it turns. A synchronous one hides behind nothing: all its counts are zero.
    """

    name: str
    message: int  # bytes that a device sends, or has at the end
    asynchronous: bool
    instructions: int  # between start and done
    loops: int  # of these, how many are loops
    products: int  # of matrices, in these, and inside their loops, branches and fusions

    @property
    def hidden(self) -> bool:
        """Whether products of matrices run while the message travels."""
        return self.products > 0


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes


_Computations = dict[str, list[_Instruction]]


def permutes(text: str) -> list[Collective]:
    """All collective permutes of a program, in the order of its text.

    Args:
        text: `jax.jit(f).lower(...).compile().as_text()`.

    Raises:
        ValueError: The program is not scheduled, or it starts a permute that it never waits for.
    """
    return collectives(text).get("collective-permute", [])


def collectives(text: str) -> dict[str, list[Collective]]:
    """All collective operations of a program by kind, each kind in the order of its text.

    Args and errors are those of `permutes`.
    """
    computations = _computations(text)
    found: dict[str, list[Collective]] = {}
    for body, position, kind in _starts(computations):
        found.setdefault(kind, []).append(_collective(body, position, computations))
    return found


def in_flight(text: str) -> int:
    """Bytes of the messages of permutes that are under way at the same time, at most.

    Synchronous messages are under way one after the other. Args and errors are those of `permutes`.
    """
    computations = _computations(text)
    most = 0
    under_way: dict[int, list[tuple[int, int]]] = {}
    for body, position, kind in _starts(computations):
        if kind == "collective-permute":
            found = _collective(body, position, computations)
            end = _done(body, position) if found.asynchronous else position
            beside = [(e, size) for e, size in under_way.get(id(body), []) if e > position]
            under_way[id(body)] = [*beside, (end, found.message)]
            most = max(most, sum(size for _, size in under_way[id(body)]))
    return most


def _starts(computations: _Computations) -> Iterator[tuple[list[_Instruction], int, str]]:
    """Where collective operations start: computation, position in it, kind."""
    fused = {
        name
        for body in computations.values()
        for each in body
        if each.opcode == "fusion"
        for name in _called(each)
    }
    for name, body in computations.items():
        if name in fused:
            continue
        for position, instruction in enumerate(body):
            kind = instruction.opcode.removesuffix("-start")
            if instruction.name.startswith(_FUSED_START):
                inside = {each.opcode for each in _reached([instruction], computations)}
                kind = next((each for each in _KINDS if each in inside), "fusion")
            if kind in _KINDS:
                yield body, position, kind


def _computations(text: str) -> _Computations:
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError("the program is not scheduled; pass the text of a compiled one")
    computations: _Computations = {}
    body: list[_Instruction] = []
    for line in text.splitlines():
        if opening := _COMPUTATION.match(line):
            body = computations[opening[1]] = []
        elif instruction := _INSTRUCTION.match(line):
            body.append(_Instruction(*instruction.groups()))
    return computations


def _collective(body: list[_Instruction], position: int, computations: _Computations) -> Collective:
    start = body[position]
    split = start.opcode.endswith("-start") or start.opcode == "fusion"
    done = _done(body, position) if split else position
    # XLA:GPU can leave start and done in a program and yet run the message synchronously.
    asynchronous = split and '"is_sync":true' not in start.rest
    between = body[position + 1 : done] if asynchronous else []
    return Collective(
        name=start.name,
        message=_bytes(body[done].shape),
        asynchronous=asynchronous,
        instructions=len(between),
        loops=sum(instruction.opcode == "while" for instruction in between),
        products=sum(map(_is_product, _reached(between, computations))),
    )


def _done(body: list[_Instruction], start: int) -> int:
    operand = re.compile(rf"(?:.* )?%?{re.escape(body[start].name)}\)")
    # A fused start hands its parts on one by one; its name tells where it ends.
    named = body[start].name.replace(_FUSED_START, _FUSED_START.replace("start", "done"))
    fused = body[start].opcode == "fusion"
    for position in range(start + 1, len(body)):
        each = body[position]
        if fused and each.name == named:
            return position
        if each.opcode.endswith("-done") and operand.match(each.rest):
            return position
    raise ValueError(f"the program starts {body[start].name} and never waits for it")


def _bytes(shape: str) -> int:
    """Size of all arrays of a shape."""
    return sum(
        math.prod(int(size) for size in sizes.split(",") if size) * int(bits or 8) // 8
        for bits, sizes in _ARRAY.findall(shape)
    )


def _is_product(instruction: _Instruction) -> bool:
    return instruction.opcode in ("dot", "convolution") or (
        instruction.opcode == "custom-call" and bool(_LIBRARY_PRODUCT.search(instruction.rest))
    )


def _reached(body: Iterable[_Instruction], computations: _Computations) -> Iterator[_Instruction]:
    """The instructions, and those of every computation they call, once for each call."""
    for instruction in body:
        yield instruction
        for name in _called(instruction):
            yield from _reached(computations[name], computations)


def _called(instruction: _Instruction) -> Iterator[str]:
    """Names of the computations that an instruction calls."""
    for one, several in _CALLED.findall(instruction.rest):
        yield from [one] if one else several.replace("%", "").split(", ")
