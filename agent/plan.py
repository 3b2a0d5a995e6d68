"""A plan: what a run's training step needs on devices that need not be here, and whether it fits.

The step is compiled, as training would compile it, by the compiler of the devices meant
(`ring.targets`), for batches with the most trajectories that the run draws. Beside what the
compiler reserves stands what one would count (`agent.estimate`).
"""

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

import ring
from agent import ahead, buffers, estimate, networks, throughput
from agent.ahead import Compiled, Refused
from agent.config import TRANSFORMERS, Dtype, TrainConfig
from agent.estimate import StepTime
from ring import schedule
from ring.targets import Target, devices

PREALLOCATED = 0.75
"""Fraction of a GPU's memory that JAX takes by default."""

USABLE = 0.92
"""Fraction of a GPU's memory that it can be told to take (XLA_PYTHON_CLIENT_MEM_FRACTION): CUDA,
its libraries and their buffers for messages need the rest."""

WAITING = 2
"""Batches that training holds beside the one it computes with: drawn ahead, and not yet freed."""

EFFICIENCY = 0.35
"""Fraction of the peak that products are expected to reach, those that are computed again included.
The Ring Attention paper's runs on A100 and TPU v4 did about as much without counting those (figure
3 there)."""


@dataclass(frozen=True)
class Plan:
    """What one step needs. Bytes are those of one device.

    Attributes:
        config: of the run, on the mesh meant.
        target: the devices.
        rows: B, chains in a batch.
        steps: S, padded.
        parameters: numbers that are learned.
        counted: bytes by count.
        caches: bytes of keys and values when acting on N trajectories, by their type.
        program: what the compiler made of the step, or why it refused.
        available: bytes that a device has for a program.
        model_flops: operations a step of all devices, as utilisation counts them.
        hardware_flops: operations a step of all devices, as they are computed.
        block: tokens of a sequence on a device.
        minimum_block: tokens with which sending keys and values hides behind attention, at the
            devices' peak; None without a ring, or where the link is not known.
        seconds: expected.
        buffers: the largest, if asked for.
    """

    config: TrainConfig
    target: Target
    rows: int
    steps: int
    parameters: int
    counted: estimate.Bytes
    caches: dict[Dtype, int]
    program: Compiled | Refused
    available: int
    model_flops: float
    hardware_flops: float
    block: int
    minimum_block: float | None
    seconds: StepTime
    buffers: list[buffers.Buffer]

    @property
    def total(self) -> int | None:
        """Bytes that training needs, with the batches that wait; None if the compiler can't say."""
        waiting = WAITING * self.counted.batch
        if isinstance(self.program, Compiled):
            return self.program.total + waiting
        if self.program.needed is None:
            return None
        return self.program.needed + self.counted.arguments + waiting

    @property
    def trajectories(self) -> int:
        """Of a sequence, whole ones."""
        return self.steps // networks.dimensions(self.config).timesteps

    @property
    def fits(self) -> bool:
        """Whether a device has room for it."""
        if isinstance(self.program, Refused):
            return False
        return self.total is not None and self.total <= self.available

    @property
    def collectives(self) -> dict[str, list[schedule.Collective]]:
        """Of the compiled program, by kind."""
        return schedule.collectives(self.program.text) if isinstance(self.program, Compiled) else {}

    @property
    def in_flight(self) -> int | None:
        """Bytes of keys, values and gradients under way at the same time in the program."""
        return schedule.in_flight(self.program.text) if isinstance(self.program, Compiled) else None


def available(target: Target) -> int:
    """Bytes of a device that a program can have."""
    return int(target.memory * (USABLE if target.platform == "cuda" else 1))


def overlaps(collectives: dict[str, list[schedule.Collective]]) -> bool:
    """Whether at most one large message of the ring travels with nothing to hide it.

    Messages of less than a hundredth of the largest (orders of tokens) do not count.
    """
    messages = collectives.get("collective-permute", [])
    large = max((each.message for each in messages), default=0) / 100
    exposed = [each for each in messages if each.message > large and not each.hidden]
    return len(exposed) <= 1


def filled(config: TrainConfig, target: Target) -> TrainConfig:
    """The run on a mesh of all of the target's devices.

    As it is, if its mesh has as many; else the ring takes all devices of which each still gets a
    block of the longest chain, and `data` the rest. Without a ring `data` takes all.

    Raises:
        ValueError: settings that cannot work on any mesh.
    """
    if config.mesh.devices == target.size:
        return config
    # Another mesh may not divide the sequences of a run that began elsewhere, or its rollouts.
    data = dataclasses.replace(config.data, multiple=None)
    one = dataclasses.replace(config.mesh, data=1, fsdp=1, ring=1, tensor=1)
    alone = dataclasses.replace(config, data=data, mesh=one, evaluate_rollouts=0)
    alone.check()
    ring_size = 1
    if config.method in TRANSFORMERS and config.model.memory == "ring":
        tokens = ahead.batch_shape(alone)[1] * config.tokens_per_step
        whole = max(1, tokens // config.model.block_size)
        ring_size = max(r for r in range(1, target.size + 1) if not target.size % r and r <= whole)
    mesh = dataclasses.replace(one, data=target.size // ring_size, ring=ring_size)
    return dataclasses.replace(alone, mesh=mesh)


def mesh_of(config: TrainConfig, target: Target) -> Mesh:
    """The run's mesh, made of the target's devices.

    Raises:
        ring.targets.MissingCompiler: the target's compiler is not installed.
        ValueError: the mesh has another number of devices.
    """
    sizes = config.mesh
    if sizes.devices != target.size:
        axes = f"data {sizes.data} × fsdp {sizes.fsdp} × ring {sizes.ring} × tensor {sizes.tensor}"
        raise ValueError(
            f"a mesh of {axes} has {sizes.devices} devices, {target} has {target.size}; "
            f"change mesh.* or the target so that they agree"
        )
    return ring.make_mesh(sizes.data, sizes.fsdp, sizes.ring, sizes.tensor, devices=devices(target))


def plan(
    config: TrainConfig,
    target: Target,
    *,
    shape: tuple[int, int] | None = None,
    efficiency: float = EFFICIENCY,
    explain: bool = False,
) -> Plan:
    """Compile the run's training step for a target and take stock.

    Args:
        config: of the run; its mesh has as many devices as the target, see `filled`.
        target: what to compile for.
        shape: B and S of the batch, by default those of the run's largest.
        efficiency: fraction of the peak that products are expected to reach.
        explain: find the largest buffers, too.

    Raises:
        ring.targets.MissingCompiler: the target's compiler is not installed.
        ValueError: settings that cannot work.
    """
    config.check()
    mesh = mesh_of(config, target)
    rows, steps = shape or ahead.batch_shape(config)
    counted = estimate.bytes_of(config, mesh, rows, steps)
    parameters = networks.parameter_count(config, mesh)
    work = estimate.operations(config, parameters, rows, steps)
    with tempfile.TemporaryDirectory(prefix="exoring-plan-") as folder:
        dump = Path(folder) if explain else None
        program = ahead.compile_program(ahead.lower_step(config, mesh, rows, steps), dump)
        largest = buffers.largest(dump) if dump else []
    messages = schedule.collectives(program.text) if isinstance(program, Compiled) else {}
    peak = _peak(config, target, mesh)
    around = target.link(config.mesh.ring * config.mesh.tensor)
    return Plan(
        config=config,
        target=target,
        rows=rows,
        steps=steps,
        parameters=parameters,
        counted=counted,
        caches=_caches(config),
        program=program,
        available=available(target),
        model_flops=throughput.step_flops(config, parameters, rows, steps),
        hardware_flops=work.attention + work.other,
        block=steps * config.tokens_per_step // config.mesh.ring,
        minimum_block=_minimum_block(config, peak, around),
        seconds=estimate.step_time(
            config,
            work,
            counted,
            rows=rows,
            steps=steps,
            flops_per_second=efficiency * peak,
            link=lambda neighbours: target.link(neighbours) or float("inf"),
            hidden=isinstance(program, Compiled) and overlaps(messages),
        ),
        buffers=largest,
    )


def _caches(config: TrainConfig) -> dict[Dtype, int]:
    """Bytes of keys and values when acting, of methods that have a cache."""
    if config.method not in ("at", "dt_long"):
        return {}
    return {dtype: estimate.cache_bytes(config, dtype) for dtype in ("float32", "bfloat16")}


def _peak(config: TrainConfig, target: Target, mesh: Mesh) -> float:
    """Operations a second of one device; a CPU's rate of float32 products is measured."""
    if target.rates is None:
        return throughput.peak(mesh).flops_per_second / mesh.devices.size
    return getattr(target.rates, config.model.dtype)


def _minimum_block(config: TrainConfig, peak: float, link: float | None) -> float | None:
    """`ring.cost.minimum_block`, for causal attention and numbers of the run's type."""
    if config.mesh.ring == 1 or link is None:
        return None
    # Twice for causal attention, and as often as a number has two bytes.
    return ring.cost.minimum_block(peak, link) * jax.numpy.dtype(config.model.dtype).itemsize
