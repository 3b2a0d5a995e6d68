"""Two processes with four devices each make one ring of eight."""

import os
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import ring

port, process = sys.argv[1:]
ring.simulate_devices(4)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
mesh = ring.make_mesh(ring=8)
rng = np.random.default_rng(0)
arrays = [rng.normal(size=(2, 192, 2, 16)).astype(np.float32) for _ in range(4)]
segments = np.arange(192, dtype=np.int32) // 50


def both(attend, q, k, v, dout):
    out, vjp = jax.vjp(attend, q, k, v)
    return out, *vjp(dout)


sharding = NamedSharding(mesh, P(None, "ring"))
shards = [jax.make_array_from_callback(x.shape, sharding, lambda i, x=x: x[i]) for x in arrays]
for options in ({}, {"segments": segments}):
    ours = lambda q, k, v: ring.attention(
        q, k, v, implementation="ring", mesh=mesh, block_size=16, **options
    )
    found = jax.jit(lambda *x: both(ours, *x))(*shards)
    device = jax.local_devices()[0]
    local = [jax.device_put(x, device) for x in arrays]
    expected = both(lambda *x: ring.attention(*x, **options), *local)
    for x, y in zip(found, expected, strict=True):
        for shard in x.addressable_shards:
            np.testing.assert_allclose(
                shard.data, np.asarray(y)[shard.index], rtol=1e-5, atol=1e-5
            )
print(f"process {process} of {jax.process_count()}: {jax.device_count()} devices agree")
"""


@pytest.mark.slow
def test_a_ring_over_two_processes_equals_dense_attention_on_one_device():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, port, str(process)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        results = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (output, errors) in enumerate(results):
        assert f"process {process} of 2: 8 devices agree" in output, errors
