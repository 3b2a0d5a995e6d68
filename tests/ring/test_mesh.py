"""Device meshes."""

import os
import subprocess
import sys

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
    with pytest.raises(ValueError, match=r"needs 16 devices, 8 are.*simulate_devices\(16\)"):
        ring.make_mesh(data=2, ring=8)
    with pytest.raises(ValueError, match="needs 2 devices, 3 were given"):
        ring.make_mesh(ring=2, devices=jax.devices()[:3])
    with pytest.raises(ValueError, match="tensor=0"):
        ring.make_mesh(tensor=0)


MEMORY = """
import jax
import ring
from jax.sharding import PartitionSpec as P

ring.simulate_devices(8)
spec = P(None, "ring")


def turns(x):
    return jax.lax.fori_loop(0, 2_000, lambda _, x: jax.numpy.tanh(x @ x), x)


x = jax.numpy.zeros((256, 8 * 256))
run = jax.shard_map(turns, mesh=ring.make_mesh(ring=8), in_specs=spec, out_specs=spec)
run = jax.jit(run).lower(x).compile()


def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


before = peak()
jax.block_until_ready(run(x))
print((peak() - before) // 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")
def test_loops_of_simulated_devices_hold_no_memory():
    """Without threads of their own it was 136 MiB here, growing with the loop."""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "JAX_NUM_CPU_DEVICES")
    }
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50
