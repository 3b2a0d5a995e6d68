"""The mesh, and how parameters lie on it."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ring
from agent.config import MeshConfig

SMALLEST_SHARDED = 2**16
"""Parameters with fewer elements are replicated: gathering them would cost more than they hold."""


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh of a run; with ``simulated``, made of as many simulated CPU devices.

    Raises:
        ValueError: fewer devices than the mesh needs, or JAX was used before simulating them.
    """
    if config.simulated and not _simulate(config.devices):
        raise ValueError(
            f"mesh.simulated needs {config.devices} CPU devices, but JAX is already running with "
            f"{len(jax.devices())}; start a new process"
        )
    return ring.make_mesh(config.data, config.fsdp, config.ring, config.tensor)


def _simulate(devices: int) -> bool:
    """Ask for simulated CPU devices before JAX starts; whether enough are there."""
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:  # JAX has started
        pass
    return len(jax.devices("cpu")) >= devices


def parameter_spec(shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Shard the largest dimension that divides over fsdp × ring; small parameters stay whole.

    The ring axis holds parameters too: its devices would otherwise each keep all of them.
    """
    shards = mesh.shape["fsdp"] * mesh.shape["ring"]
    size = 1
    for extent in shape:
        size *= extent
    divisible = [axis for axis, extent in enumerate(shape) if extent % shards == 0]
    if shards == 1 or size < SMALLEST_SHARDED or not divisible:
        return PartitionSpec()
    largest = max(divisible, key=lambda axis: shape[axis])
    return PartitionSpec(*[None] * largest, ("fsdp", "ring"))


def state_sharding(tree: Any, mesh: Mesh) -> Any:
    """Shardings for a tree of arrays or shapes, leaf by leaf after `parameter_spec`."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, parameter_spec(leaf.shape, mesh)), tree)
