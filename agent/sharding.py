"""The mesh, and how parameters lie on it."""

import contextlib
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import ring
from agent.config import MeshConfig, Platform
from ring import targets

Tree = TypeVar("Tree")

SMALLEST_SHARDED = 2**16
"""Parameters with fewer elements are replicated: gathering them would cost more than they hold."""

STACKED = "blocks"
"""Parameters below this name are stacked over layers, which are never split."""

_TENSOR_AXES = {
    ("query_key_value", "kernel"): -2,  # [E, 3, H, D]: heads
    ("query_key_value", "bias"): -2,
    ("project", "kernel"): -3,  # [H, D, E]
    ("expand", "kernel"): -1,  # [E, 4E]: hidden units
    ("expand", "bias"): -1,
    ("contract", "kernel"): -2,  # [4E, E]
}
"""Which axis of a block's parameter is split over ``tensor`` (Megatron-LM, arXiv 1909.08053)."""


def make_mesh(config: MeshConfig, require: Platform | None = None) -> Mesh:
    """The mesh of a run; with ``simulated``, made of as many simulated CPU devices.

    Raises:
        ValueError: another platform than required, fewer devices than the mesh needs, or JAX was
            used before simulating them.
    """
    if config.simulated and not _simulate(config.devices):
        raise ValueError(
            f"mesh.simulated needs {config.devices} CPU devices, but JAX is already running with "
            f"{len(jax.devices())}; start a new process"
        )
    platform = jax.default_backend()
    if require and platform != require:
        raise ValueError(
            f"require={require}, but JAX runs on {platform}: install the extra of your platform "
            f'(pip install -e ".[gpu]" or ".[tpu]") and see that jax.devices() lists it'
        )
    return ring.make_mesh(config.data, config.fsdp, config.ring, config.tensor)


def _simulate(devices: int) -> bool:
    """Ask for simulated CPU devices before JAX starts; whether enough are there."""
    with contextlib.suppress(RuntimeError):  # JAX has started
        ring.simulate_devices(devices)
    return len(jax.devices("cpu")) >= devices


def compiler_options(mesh: Mesh) -> dict[str, Any] | None:
    """What our jitted programs are compiled with, on top of XLA_FLAGS, which are the user's.

    Wide vectors double XLA:CPU's exp throughput; on GPUs a ring's messages are made to overlap with
    its products (`ring.targets.compiler_options`); TPUs need nothing.
    """
    platform = mesh.devices.flat[0].platform
    if platform == "cpu":
        return {"xla_cpu_prefer_vector_width": 512}
    return targets.compiler_options(platform) or None


def parameter_spec(
    path: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh, *, stored: bool = True
) -> PartitionSpec:
    """How one parameter, or its moments, lies on the mesh.

    Heads and hidden units are split over ``tensor``. Where it is stored, its largest dimension
    that divides is split over fsdp × ring too, unless it is small: the devices of a ring would
    otherwise each keep all of it.

    Args:
        path: names down to the parameter, such as ``("blocks", "expand", "kernel")``.
        shape: with the layers first below `STACKED`.
        mesh: whose axes are meant.
        stored: False tells how it lies while its layer is computed.
    """
    axes: list[Any] = [None] * len(shape)
    for names, axis in _TENSOR_AXES.items():
        if mesh.shape["tensor"] > 1 and _contains(path, names):
            axes[axis] = "tensor"
    shards = mesh.shape["fsdp"] * mesh.shape["ring"]
    first = 1 if STACKED in path else 0
    free = [
        axis
        for axis in range(first, len(shape))
        if axes[axis] is None and shape[axis] % shards == 0
    ]
    if stored and shards > 1 and math.prod(shape) >= SMALLEST_SHARDED and free:
        axes[max(free, key=lambda axis: shape[axis])] = ("fsdp", "ring")
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def _contains(path: tuple[str, ...], names: tuple[str, ...]) -> bool:
    return any(path[i : i + len(names)] == names for i in range(len(path)))


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree of parameters with their names, such as ``blocks/expand/kernel``."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [("/".join(_names(path)).removesuffix("/value"), leaf) for path, leaf in leaves]


def shard_bytes(tree: Any) -> int:
    """Bytes of one device's shards of a tree of arrays or shapes."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def shardings(tree: Any, mesh: Mesh) -> Any:
    """How a tree of parameters or optimizer state is stored, leaf by leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, parameter_spec(_names(path), leaf.shape, mesh)), tree
    )


def with_shardings(tree: Any, mesh: Mesh) -> Any:
    """The same tree as shapes that say how they are stored."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        tree,
        shardings(tree, mesh),
    )


def gathered(parameters: Tree, *, but: str | None = None, dtype: str = "float32") -> Tree:
    """Parameters as devices compute with them, on the mesh of the context.

    The gradient of what is gathered is summed back into the shards.

    Args:
        parameters: of one layer, or of a network.
        but: leave those below this name in their shards.
        dtype: cast products' operands to it first, so that less is sent.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def gather(path: Any, leaf: jax.Array) -> jax.Array:
        names = _names(path)
        if but in names:
            return leaf
        if leaf.ndim > 1:
            leaf = leaf.astype(jnp.dtype(dtype))
        if mesh.empty or mesh.size == 1:
            return leaf
        spec = parameter_spec(names, leaf.shape, mesh, stored=False)
        return jax.lax.with_sharding_constraint(leaf, spec)

    return jax.tree_util.tree_map_with_path(gather, parameters)
