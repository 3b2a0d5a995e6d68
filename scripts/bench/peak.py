"""What a training step really takes on simulated CPU devices, in a process of its own.

`python -m scripts.bench.peak MODEL MODE RING TOKENS` plans a step of a model of
`scripts.bench.context`, runs it twice and prints, as JSON, the cell of the plan with the bytes of
one device that were in use at the second step's worst moment, and its seconds.

The peak is Linux's: the high-water mark of resident memory, reset before the step. The baseline is
what was resident then, given back to the system as far as malloc does, with the step's operands in
it; these are added as they lie on the devices.
"""

import ctypes
import dataclasses
import json
import sys
import time
from pathlib import Path

import jax

import ring


def main(model: str, mode: str, size: int, tokens: int) -> None:
    """Run, and print one line of JSON."""
    jax.config.update("jax_platforms", "cpu")
    ring.simulate_devices(size)
    from agent import ahead, checkpoint
    from agent.sharding import make_mesh, shard_bytes
    from scripts.bench.cells import compiled
    from scripts.bench.context import memory_series
    from scripts.bench.train import random_batch

    series = memory_series(model, "cpu", mode, size)
    planned = compiled(series, tokens)
    config, (rows, steps) = series.config, series.shape(tokens)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        step = ahead.lower_step(config, mesh, rows, steps).compile()
        state = checkpoint.initial_state(config, mesh)
        batch = random_batch(mesh, steps)
        state, values = step(state, batch)  # the first one starts threads and fills caches
        jax.block_until_ready((state, values))
        held = shard_bytes((state, batch))
        before = _reset()
        start = time.perf_counter()
        jax.block_until_ready(step(state, batch))
        seconds = time.perf_counter() - start
    used = _status("VmHWM") - before
    found = dataclasses.replace(planned, measured=used // size + held, seconds=round(seconds, 2))
    print(json.dumps(dataclasses.asdict(found)))


def _reset() -> int:
    """Give freed memory back, forget the peak so far, and return the bytes now resident."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}: this needs Linux")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
