"""Accelerators to compile for on a machine that has none.

`jax.jit(f).lower(shapes).compile()` needs devices to say where its operands lie, not to hold them.
`devices("v5e:2x4")` hands out such devices: their compiler is the real one, so the schedule, the
memory a program reserves, and the refusal of one that does not fit, are real as well.

The compilers come with the extras `plan-tpu` (libtpu) and `plan-gpu` (JAX's CUDA plug-in, without
CUDA itself).
"""

import contextlib
import importlib.util
import math
import os
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
from jax.experimental import topologies

from ring.rates import RATES, Rates

Platform = Literal["tpu", "cuda", "cpu"]

GIB = 2**30
GPUS_PER_HOST = 8


class _Tpu(NamedTuple):
    pod: tuple[int, ...]  # the largest there is, ascending
    memory: int  # bytes of a device
    options: dict[str, str]


class _Gpu(NamedTuple):
    description: str
    capability: int
    cores: int
    fpus: int  # of a core
    shared: int  # bytes of a core
    cache: int  # bytes, level 2
    gigahertz: float
    bandwidth: int  # bytes a second
    memory: int  # bytes


# Memory as libtpu states it when it refuses a program. A v4 chip is one device of two cores, as it
# is on a real slice; libtpu would describe each core as a device.
_TPUS = {
    "v4": _Tpu((16, 16, 16), int(30.75 * GIB), {"chip_config_name": "megacore"}),
    "v5e": _Tpu((16, 16), int(15.75 * GIB), {}),
    "v5p": _Tpu((16, 20, 28), int(95.73 * GIB), {}),
    "v6e": _Tpu((16, 16), int(31.24 * GIB), {}),
}
# As in OpenXLA, xla/backends/gpu/target_config/specs, the H200's memory rounded down. JAX takes
# three quarters of it unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
_A100 = _Gpu("NVIDIA A100-SXM4-40GB", 8, 108, 64, 167936, 41943040, 1.41, 1555 * 10**9, 42331013120)
_H100 = _Gpu(
    "NVIDIA H100 80GB HBM3", 9, 132, 128, 233472, 52428800, 1.98, 3352 * 10**9, 84942979072
)
_GPUS = {
    "a100-40": _A100,
    "a100-80": _A100._replace(
        description="NVIDIA A100-SXM4-80GB", bandwidth=2039 * 10**9, memory=85100068864
    ),
    "h100": _H100,
    "h200": _H100._replace(description="NVIDIA H200", bandwidth=4800 * 10**9, memory=150 * 10**9),
}


class MissingCompiler(ImportError):
    """The compiler of a target is not installed; the message says which extra brings it."""


class Target(NamedTuple):
    """Devices of one kind: a TPU slice of some shape, or a number of GPUs or CPU devices."""

    platform: Platform
    kind: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def size(self) -> int:
        """How many devices."""
        return math.prod(self.shape)

    @property
    def memory(self) -> int:
        """Bytes of one device; CPU devices share the memory of this machine evenly."""
        if self.platform == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.size
        return (_TPUS if self.platform == "tpu" else _GPUS)[self.kind].memory

    @property
    def compiler(self) -> str:
        """The package that the compiler comes with."""
        if self.platform == "cuda":
            return f"jax-cuda{13 if _found('jax_plugins.xla_cuda13') else 12}-plugin"
        return {"tpu": "libtpu", "cpu": "jaxlib"}[self.platform]

    @property
    def rates(self) -> Rates | None:
        """Vendors' figures of one device; none of a CPU."""
        return RATES.get(self.kind)

    def link(self, neighbours: int) -> float | None:
        """Bytes a second of the slowest link around a ring of so many devices in a row."""
        if self.rates is None:
            return None
        within = neighbours <= GPUS_PER_HOST and (
            self.size <= GPUS_PER_HOST or GPUS_PER_HOST % neighbours == 0  # else some straddle
        )
        inside = self.platform != "cuda" or within
        return self.rates.link if inside else self.rates.network

    def doubled(self) -> "Target | None":
        """Twice the devices: the shortest axis of a slice twice as long; None beyond a pod."""
        axis = self.shape.index(min(self.shape))
        shape = tuple(size * (1 + (at == axis)) for at, size in enumerate(self.shape))
        if self.platform == "cuda" and self.size > GPUS_PER_HOST // 2:
            shape = (_hosts(self._replace(shape=shape)) * GPUS_PER_HOST,)
        more = self._replace(shape=tuple(sorted(shape)))
        return None if more.platform == "tpu" and _unavailable(more) else more


def parse(name: str) -> Target:
    """Reads a target such as `v5e:2x4` (a TPU slice), `h200:8` (GPUs) or `cpu:8`.

    GPUs beyond 8 are spread over hosts of 8.

    Raises:
        ValueError: There is no such kind, or not in such a shape.
    """
    kind, _, sizes = name.partition(":")
    shape = tuple(int(size) for size in sizes.split("x") if size.isdecimal())
    axes, what, example = 1, "a number of devices", "8"
    if kind in _TPUS:
        platform, axes = "tpu", len(_TPUS[kind].pod)
        what, example = "a slice by its shape", "2x4" if axes == 2 else "2x2x2"
    elif kind in _GPUS:
        platform = "cuda"
    elif kind == "cpu":
        platform = "cpu"
    else:
        kinds = ", ".join([*_TPUS, *_GPUS, "cpu"])
        raise ValueError(f"target {name!r} is none of {kinds}, as in v5e:2x4, h200:8 or cpu:8")
    target = Target(platform, kind, shape)
    if str(target) != name or len(shape) != axes or target.size < 1:
        raise ValueError(f"target {name!r}: name {what}, such as {kind}:{example}")
    if platform == "tpu" and (why := _unavailable(target)):
        raise ValueError(f"target {name!r}: {why}")
    filled = _hosts(target) * GPUS_PER_HOST
    if platform == "cuda" and GPUS_PER_HOST < target.size < filled:
        raise ValueError(
            f"target {name!r}: GPUs fill hosts of {GPUS_PER_HOST}; try {kind}:{filled}"
        )
    return target


def _unavailable(target: Target) -> str:
    """What is wrong with a slice that cannot be had; libtpu compiles for any shape."""
    pod = _TPUS[target.kind].pod
    if any(size > most for size, most in zip(sorted(target.shape), pod, strict=True)):
        return f"a pod of {target.kind} is {'x'.join(map(str, pod))}"
    flat = len(pod) == 2
    if all(
        size in (1, 2, 4, 8, 16) if flat else size in (1, 2) or size % 4 == 0
        for size in target.shape
    ):
        return ""
    return f"sides of a slice are {'powers of two' if flat else '1, 2 or multiples of 4'}"


def _hosts(target: Target) -> int:
    return -(-target.size // GPUS_PER_HOST)


def installed(platform: Platform) -> bool:
    """Whether the compiler for a platform is here."""
    names = {"tpu": ["libtpu"], "cuda": ["xla_cuda12", "xla_cuda13"], "cpu": ["jax"]}[platform]
    within = "jax_plugins." if platform == "cuda" else ""
    return any(_found(within + name) for name in names)


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing already
        return False


def devices(target: Target | str) -> list[Any]:
    """The devices of a target (`jax.Device`), to make a mesh of.

    TPUs and GPUs are not here: programs can be compiled for them, and no array can be put on them.
    Compiling for GPUs where CUDA is not installed needs JAX_PLATFORMS=cpu, or
    `jax.config.update("jax_platforms", "cpu")` before JAX looks for devices the first time.

    Raises:
        MissingCompiler: The compiler is not installed, or JAX could not load it.
        ValueError: There is no such target, or JAX has been given fewer CPU devices.
    """
    target = parse(target) if isinstance(target, str) else target
    if not installed(target.platform):
        extra = "plan-tpu" if target.platform == "tpu" else "plan-gpu"
        raise MissingCompiler(f'{target} has no compiler here: pip install "exoring[{extra}]"')
    return {"tpu": _tpu, "cuda": _cuda, "cpu": _cpu}[target.platform](target)


def compiler_options(platform: str) -> dict[str, bool | int]:
    """Options for `jax.jit` under which a compiler overlaps a ring's messages with its products.

    XLA:GPU leaves its latency-hiding scheduler off for some devices, the A100 for one, and lets one
    collective at a time overlap, so that the permutes of one hop must be made into one. Compilers
    for TPUs need no option, and a CPU has no asynchronous messages.

    Args:
        platform: Of a `Target`, or of a device (`jax.Device.platform`).
    """
    if platform not in ("cuda", "gpu"):
        return {}
    return {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_collective_permute_combine_threshold_bytes": 2**40,
    }


def _tpu(target: Target) -> list[Any]:
    # A host holds 2 × 2 chips, or fewer of a smaller slice.
    host = [2 if size % 2 == 0 else 1 for size in target.shape[:2]]
    with _no_chips():
        return topologies.get_topology_desc(
            str(target),
            platform="tpu",
            chips_per_host_bounds=(*host, 1),
            **_TPUS[target.kind].options,
        ).devices


@contextlib.contextmanager
def _no_chips() -> Iterator[None]:
    """Lends libtpu, while it loads, an environment that says what JAX found: there are no chips.

    Otherwise it complains on standard error of what it cannot find out about the machine, and locks
    the absent chips, so that a second process could not compile at the same time. JAX sets
    TPU_SKIP_MDS_QUERY when it is imported where there are none. Variables that are set win.
    """
    lent = {
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    lent = {name: value for name, value in lent.items() if name not in os.environ}
    if os.environ.get("TPU_SKIP_MDS_QUERY") != "1":
        lent = {}
    os.environ.update(lent)
    try:
        yield
    finally:
        for name in lent:
            del os.environ[name]


def _cuda(target: Target) -> list[Any]:
    hosts = _hosts(target)
    try:
        return topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x{hosts}x{target.size // hosts}",  # slices, hosts, devices of a host
            target_config=_target_config(_GPUS[target.kind]),
        ).devices
    except NotImplementedError as error:
        raise MissingCompiler(
            f"{target}: JAX could not load its CUDA plug-in; set JAX_PLATFORMS=cpu to compile "
            "without CUDA, and see that jax-cuda12-plugin has the version of jaxlib"
        ) from error


def _target_config(gpu: _Gpu) -> str:
    """What XLA:GPU wants to know of a device: a stream_executor.GpuTargetConfigProto as text."""
    accelerated = "feature_extension: ACCELERATED_FEATURES" if gpu.capability == 9 else ""
    return f"""
        platform_name: "CUDA"
        device_description_str: "{gpu.description}"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        gpu_device_info {{
            cuda_compute_capability {{ major: {gpu.capability} minor: 0 {accelerated} }}
            core_count: {gpu.cores}
            fpus_per_core: {gpu.fpus}
            clock_rate_ghz: {gpu.gigahertz}
            memory_bandwidth: {gpu.bandwidth}
            device_memory_size: {gpu.memory}
            l2_cache_size: {gpu.cache}
            shared_memory_per_core: {gpu.shared}
            shared_memory_per_block_optin: {gpu.shared - 1024}
            shared_memory_per_block: 49152
            registers_per_core_limit: 65536
            registers_per_block_limit: 65536
            threads_per_warp: 32
            threads_per_core_limit: 2048
            threads_per_block_limit: 1024
            thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        }}
    """


def _cpu(target: Target) -> list[Any]:
    here = jax.devices("cpu")
    if len(here) < target.size:
        raise ValueError(
            f"{target}: JAX simulates {len(here)} CPU devices; "
            f"set JAX_NUM_CPU_DEVICES={target.size} before it starts"
        )
    return here[: target.size]
