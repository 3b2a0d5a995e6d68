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


class Permute(NamedTuple):
    """One collective permute of a compiled program, and what runs while it is under way.

    What runs is counted in the text of the program: a loop, and a product inside it, once, however
    often it turns. A synchronous permute hides behind nothing: all its counts are zero.
    """

    name: str
    message: int  # bytes that a device sends
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


def permutes(text: str) -> list[Permute]:
    """All collective permutes of a program, in the order of its text.

    Args:
        text: `jax.jit(f).lower(...).compile().as_text()`.

    Raises:
        ValueError: The program is not scheduled, or it starts a permute that it never waits for.
    """
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError("the program is not scheduled; pass the text of a compiled one")
    computations = _computations(text)
    return [
        _permute(body, position, computations)
        for body in computations.values()
        for position, instruction in enumerate(body)
        if instruction.opcode in ("collective-permute", "collective-permute-start")
    ]


def _computations(text: str) -> _Computations:
    computations: _Computations = {}
    body: list[_Instruction] = []
    for line in text.splitlines():
        if opening := _COMPUTATION.match(line):
            body = computations[opening[1]] = []
        elif instruction := _INSTRUCTION.match(line):
            body.append(_Instruction(*instruction.groups()))
    return computations


def _permute(body: list[_Instruction], position: int, computations: _Computations) -> Permute:
    permute = body[position]
    done = _done(body, position) if permute.opcode.endswith("-start") else position
    # XLA:GPU can leave start and done in a program and yet run the permute synchronously.
    asynchronous = done > position and '"is_sync":true' not in permute.rest
    between = body[position + 1 : done] if asynchronous else []
    return Permute(
        name=permute.name,
        message=_bytes(body[done].shape),
        asynchronous=asynchronous,
        instructions=len(between),
        loops=sum(instruction.opcode == "while" for instruction in between),
        products=sum(map(_is_product, _reached(between, computations))),
    )


def _done(body: list[_Instruction], start: int) -> int:
    operand = re.compile(rf"(?:.* )?%?{re.escape(body[start].name)}\)")
    for position, instruction in enumerate(body):
        if instruction.opcode == "collective-permute-done" and operand.match(instruction.rest):
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
        for one, several in _CALLED.findall(instruction.rest):
            for name in [one] if one else several.replace("%", "").split(", "):
                yield from _reached(computations[name], computations)
