"""Device meshes."""

import jax
import pytest
from jax.sharding import AxisType

import ring


def test_a_mesh_has_four_auto_axes():
    mesh = ring.make_mesh(data=2, ring=4)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "ring": 4, "tensor": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert ring.make_mesh(ring=2, devices=jax.devices()[3:5]).devices.ravel()[0].id == 3


def test_meshes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"needs 16 devices, 8 are.*device_count=16"):
        ring.make_mesh(data=2, ring=8)
    with pytest.raises(ValueError, match="needs 2 devices, 3 were given"):
        ring.make_mesh(ring=2, devices=jax.devices()[:3])
    with pytest.raises(ValueError, match="tensor=0"):
        ring.make_mesh(tensor=0)
