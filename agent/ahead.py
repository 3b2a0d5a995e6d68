"""The training step compiled from shapes alone: no episodes, no arrays, no device but an abstract.

It is the program that training runs: the same function and the same options of the compiler.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from agent import checkpoint, networks, training
from agent.config import TRANSFORMERS, TrainConfig
from data.batches import Batch, padded, sharding
from data.sampling import sequences, trajectory_counts


def batch_shape(config: TrainConfig) -> tuple[int, int]:
    """B and S, padded as on the mesh, of the training batch that takes the most memory.

    Of the n that chains may have (method at), it is that whose batches have the most tokens, or,
    where scores exist whole (memory plain), the most scores, padding not counted.

    Raises:
        ValueError: a chain has more tokens than an order, an int32, can count.
    """
    whole = networks.dimensions(config).timesteps
    steps = {"at": whole, "dt_long": whole, "dt": config.data.window}.get(config.method, 1)
    counts = [1]
    if config.method == "at":
        most = config.data.trajectories
        counts = [most] if config.data.fixed else trajectory_counts(most)
    power = 2 if config.model.memory == "plain" else 1
    shapes = [(_rows(config, n * steps), n * steps) for n in reversed(counts)]
    rows, steps = max(shapes, key=lambda shape: (shape[0] * shape[1] ** power, shape[1]))
    return rows, padded(steps, config.mesh.ring)


def _rows(config: TrainConfig, steps: int) -> int:
    """Sequences of so many steps in a batch."""
    tokens = steps * (config.tokens_per_step if config.method in TRANSFORMERS else 1)
    if tokens >= 2**31:
        raise ValueError(
            f"data.trajectories={config.data.trajectories} make a sequence of {tokens:,} tokens; "
            f"fewer than {2**31:,} can be told apart"
        )
    return sequences(tokens, config.data.batch_tokens, config.resolved().data.multiple or 1)


def abstract_batch(config: TrainConfig, mesh: Mesh, rows: int, steps: int) -> Batch:
    """A batch of B = rows and S = steps as shapes that say how they lie on the mesh."""
    dims = networks.dimensions(config)
    widths = {"observation": dims.observation}
    widths |= dict.fromkeys(("action", "previous_action"), dims.action)
    integers = ("timestep", "trajectory", "order", "chain")

    def array(name: str) -> jax.ShapeDtypeStruct:
        flat = name in (*integers, "loss_mask")
        shape = (rows, steps) if flat else (rows, steps, widths.get(name, 1))
        dtype = np.int32 if name in integers else np.float32
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(mesh))

    return Batch(**{name: array(name) for name in Batch._fields})


def lower_step(config: TrainConfig, mesh: Mesh, rows: int, steps: int) -> jax.stages.Lowered:
    """The training step for batches of B = rows and S = steps, traced but not compiled."""
    with jax.set_mesh(mesh):
        state = checkpoint.abstract_state(config, mesh)
        step: Any = training.make_step(config, mesh)
        return step.lower(state, abstract_batch(config, mesh, rows, steps))


@dataclass(frozen=True)
class Compiled:
    """What a compiler made of a program. Bytes are of one device.

    Attributes:
        arguments: bytes of operands.
        temporaries: bytes the program reserves while it runs.
        outputs: bytes of results that do not lie where operands were.
        code: bytes of the program itself, where it lies in the device's memory.
        flops: operations of one device as the compiler counts them, what is in a loop once however
            often it turns; None if it does not count.
        text: the scheduled program.
    """

    arguments: int
    temporaries: int
    outputs: int
    code: int
    flops: float | None
    text: str

    @property
    def total(self) -> int:
        """Bytes that must be free for the program to run."""
        return self.arguments + self.temporaries + self.outputs + self.code


@dataclass(frozen=True)
class Refused:
    """A program that its compiler found too large.

    Attributes:
        message: what the compiler says.
        needed: bytes that it says are needed, None if it does not.
    """

    message: str
    needed: int | None


def compile_program(lowered: jax.stages.Lowered, dump: Path | None = None) -> Compiled | Refused:
    """Compile; running out of the device's memory is an answer, and no error.

    Args:
        lowered: see `lower_step`.
        dump: an empty folder for what XLA writes about the program, see `agent.buffers`.
    """
    options = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True} if dump else {}
    try:
        with _uncached() if dump else contextlib.nullcontext():
            program = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or "vmem" in str(error):
            raise  # vmem is no memory that a shorter sequence would spare
        message = str(error).removeprefix("RESOURCE_EXHAUSTED: ").splitlines()[0]
        return Refused(message, _needed(message))
    sizes: Any = program.memory_analysis()
    counted = program.cost_analysis() or {}
    return Compiled(
        arguments=sizes.argument_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        outputs=sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        code=sizes.generated_code_size_in_bytes,
        flops=counted.get("flops"),
        text=program.as_text() or "",
    )


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Compiles although JAX's cache on disk has the program, of which XLA would write nothing."""
    config: Any = jax.config
    before = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it decides but once whether it is used
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def _needed(message: str) -> int | None:
    """Of `… required for HLO temporaries (100.50G) exceeds …` or `Used 100.50G of 15.75G hbm`."""
    found = re.search(r"(?:\(|Used )([\d.]+)([KMGT]?)i?B?\)? (?:exceeds|of)", message)
    if not found:
        return None
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " "))
