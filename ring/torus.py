"""Devices of a TPU slice in an order in which a ring's neighbours are neighbours on the torus.

Chips are linked to those next to them. In the order in which JAX lists them a ring's messages cross
several links, share them, and beyond a few chips libtpu no longer sends them asynchronously. So the
slice is cut into boxes of as many chips as a ring has, and each is walked along a closed path of
single steps.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Point = tuple[int, ...]


def boxes(devices: Sequence[Any], ring: int) -> np.ndarray | None:
    """Devices as ``[boxes, ring]``, each row a closed path of neighbours; boxes are to and fro.

    None if devices have no coordinates, as GPUs and CPUs, or fill no grid that such boxes tile.

    Args:
        devices: of a slice.
        ring: chips of a path.
    """
    at = {tuple(d.coords): d for d in devices if getattr(d, "coords", None) is not None}
    if len(at) < len(devices):
        return None
    low, high = ([f(axis) for axis in zip(*at, strict=True)] for f in (min, max))
    sides = [b - a + 1 for a, b in zip(low, high, strict=True)]
    box = _box(sides, ring)
    if math.prod(sides) != len(devices) or box is None:
        return None
    corners = _path([side // length for side, length in zip(sides, box, strict=True)])

    def device(corner: Point, step: Point) -> Any:
        return at[tuple(a + c * b + s for a, b, c, s in zip(low, box, corner, step, strict=True))]

    return np.array([[device(corner, step) for step in _cycle(box)] for corner in corners])


def _box(sides: Sequence[int], count: int) -> Point | None:
    """The most cubic box of so many chips that tiles a grid and has a closed path; None if none."""
    divisors = [[n for n in range(1, side + 1) if side % n == 0] for side in sides]
    found = [box for box in itertools.product(*divisors) if math.prod(box) == count]
    closed = [box for box in found if count < 3 or (count % 2 == 0 and max(box) < count)]
    return min(closed, key=lambda box: (sum(box), box), default=None)


def _path(sides: Sequence[int]) -> list[Point]:
    """All points of a grid, each a neighbour of the one before: to and fro."""
    if not sides:
        return [()]
    rest = _path(sides[1:])
    return [
        (first, *point)
        for first in range(sides[0])
        for point in (rest if first % 2 == 0 else rest[::-1])
    ]


def _cycle(sides: Sequence[int]) -> list[Point]:
    """`_path` closed: of a grid with an even number of points and two sides longer than 1.

    Rows are walked to and fro but for their first points, which are the way home. An even number of
    them brings the walk back to where it began.
    """
    long = [axis for axis, side in enumerate(sides) if side > 1]
    if len(long) < 2:
        return _path(sides)
    even = next(axis for axis in long if sides[axis] % 2 == 0)
    others = [axis for axis in range(len(sides)) if axis != even]
    row = _path([sides[axis] for axis in others])

    def point(at: int, across: Point) -> Point:
        whole = dict(zip(others, across, strict=True)) | {even: at}
        return tuple(whole[axis] for axis in range(len(sides)))

    there = [
        point(at, across)
        for at in range(sides[even])
        for across in (row[1:] if at % 2 == 0 else row[:0:-1])
    ]
    return there + [point(at, row[0]) for at in reversed(range(sides[even]))]
