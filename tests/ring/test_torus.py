"""Rings on TPU slices: every message goes to a linked chip."""

import itertools
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ring
from ring import targets, torus


class Chip(SimpleNamespace):
    """A device, of which only coordinates are asked."""

    __hash__ = object.__hash__


def slice_of(sides, low=0):
    """Devices of a slice as JAX lists them, by coordinates with x first."""
    points = itertools.product(*(range(low, low + side) for side in reversed(sides)))
    return [Chip(coords=list(point[::-1])) for point in points]


def links(a, b):
    """Links between two chips, without a torus' way around."""
    return sum(abs(x - y) for x, y in zip(a.coords, b.coords, strict=True))


@given(
    sides=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3),
    low=st.integers(0, 3),
    data=st.data(),
)
def test_a_ring_is_a_closed_path_of_neighbours(sides, low, data):
    devices = slice_of(sides, low)
    counts = [n for n in range(1, len(devices) + 1) if len(devices) % n == 0]
    count = data.draw(st.sampled_from(counts))
    boxes = torus.boxes(devices, count)
    if boxes is None:  # a line, an odd number of chips, or no such box
        boxed = [
            box
            for box in itertools.product(*(range(1, side + 1) for side in sides))
            if math.prod(box) == count
            and all(side % b == 0 for side, b in zip(sides, box, strict=True))
            and max(box) < count
        ]
        assert count > 2 and (count % 2 or not boxed)
        return
    assert boxes.shape == (len(devices) // count, count)
    assert {id(device) for device in boxes.flat} == {id(device) for device in devices}
    for row in boxes:
        for a, b in itertools.pairwise([*row, row[0]]):
            assert links(a, b) == (count > 1)


@pytest.mark.parametrize(
    ("sides", "sizes"),
    [
        ((4, 8, 1), dict(ring=32)),
        ((4, 8, 1), dict(data=2, fsdp=2, ring=4, tensor=2)),
        ((4, 4, 4), dict(fsdp=4, ring=16)),
    ],
)
def test_meshes_are_made_of_such_rings(sides, sizes):
    mesh = ring.make_mesh(**sizes, devices=slice_of(sides))
    assert dict(mesh.shape) == dict(data=1, fsdp=1, ring=1, tensor=1) | sizes
    for *_, at in itertools.product(*map(range, (*mesh.devices.shape[:2], mesh.shape["tensor"]))):
        for row in mesh.devices[..., at].reshape(-1, mesh.shape["ring"]):
            assert all(links(a, b) == 1 for a, b in itertools.pairwise([*row, row[0]]))


def test_other_devices_stay_as_they_are():
    assert torus.boxes([SimpleNamespace(coords=None)] * 4, 2) is None
    assert torus.boxes([SimpleNamespace()] * 4, 2) is None
    two_cores = [SimpleNamespace(coords=(n // 2, 0, 0)) for n in range(8)]
    assert torus.boxes(two_cores, 4) is None
    assert torus.boxes(slice_of((3, 3))[:-1], 2) is None  # a corner is missing


@pytest.mark.skipif(not targets.installed("tpu"), reason="needs plan-tpu")
def test_coordinates_are_those_of_a_slice():
    devices = targets.devices(targets.parse("v5e:4x8"))
    for row in torus.boxes(devices, 8):
        assert all(links(a, b) == 1 for a, b in itertools.pairwise([*row, row[0]]))
