"""How fast a run is against what its devices could do, and how much memory it takes."""

import resource
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import ring
from agent.config import TRANSFORMERS, TrainConfig
from ring import rates

_PRODUCTS = 8
"""In a program: of a single product the time to start it would be measured too."""


@dataclass(frozen=True)
class Peak:
    """The most operations a second of all devices of a run, and where the number is from."""

    flops_per_second: float
    source: str


def peak(mesh: Mesh) -> Peak:
    """The vendor's figure, or for devices without one, such as CPUs, that of matrix products.

    Outside of a mesh context, because each device computes by itself.
    """
    device, count = mesh.devices.flat[0], mesh.devices.size
    if known := rates.of_device(device.device_kind):
        total = known.rates.bfloat16 * count
        return Peak(total, f"{count} × {known.name}'s bfloat16 peak")
    size, devices = 512, mesh.local_devices
    products = jax.jit(lambda x: jax.lax.fori_loop(0, _PRODUCTS, lambda _, y: x @ y, x))
    operands = [jax.device_put(jnp.eye(size, dtype=jnp.float32), one) for one in devices]
    jax.block_until_ready([products(x) for x in operands])
    # Simulated devices share the cores of their process, so all of them work at the same time.
    seconds = min(_seconds(products, operands) for _ in range(5))
    rate = len(devices) * _PRODUCTS * 2 * size**3 / seconds * jax.process_count()
    return Peak(rate, f"float32 products of {size} × {size} on these devices, measured now")


def _seconds(product: Any, operands: list[jax.Array]) -> float:
    start = time.perf_counter()
    jax.block_until_ready([product(x) for x in operands])
    return time.perf_counter() - start


def step_flops(config: TrainConfig, parameters: int, rows: int, steps: int) -> float:
    """Model operations of a training step on ``rows`` sequences of ``steps`` steps.

    Causal attention counted half and recomputation not at all (see `ring.cost`); without
    cross-episode attention this counts what would be visible with it. Behaviour cloning takes six
    operations a parameter and row.
    """
    if config.method not in TRANSFORMERS:
        return 6.0 * parameters * rows
    length = steps * config.tokens_per_step
    return rows * ring.cost.training_flops(config.model.layers, config.model.width, length)


def memory_bytes(mesh: Mesh) -> int:
    """Peak bytes of the busiest device here; on a CPU of this process, all its devices together."""
    stats = [device.memory_stats() for device in mesh.local_devices]
    if all(stats):
        return max(each["peak_bytes_in_use"] for each in stats if each)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
