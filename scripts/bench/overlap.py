"""Whether a ring's messages travel while it computes, on devices that need not be here.

Compiles ring attention for each target and reads the schedule: every collective permute, whether it
is asynchronous, and how many products of matrices run between its start and its end. Products are
counted in the text of the program, not as often as loops repeat them. The last message of a
backward pass brings gradients home: nothing is left to hide it. Needs the extras `plan-tpu` and
`plan-gpu`; nothing is run.
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence

import jax
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ring
from ring import schedule, targets
from scripts.command import versions

TARGETS = ("v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "a100-80:8", "h100:8", "h200:8")
COMPILERS = ("jax", "libtpu", "jax-cuda12-plugin")


def main(options: Sequence[str]) -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench overlap",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="example: python -m scripts.bench overlap --targets v5e:2x4 h200:8 --length 131072",
    )
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="rings of all their devices")
    parser.add_argument("--length", type=int, default=16384, help="tokens")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    arguments = parser.parse_args(options)
    chosen = [targets.parse(name) for name in arguments.targets]
    # Compiling for other platforms must not start them here.
    jax.config.update("jax_platforms", "cpu")
    simulated = max((target.size for target in chosen if target.platform == "cpu"), default=1)
    ring.simulate_devices(simulated)
    for target in chosen:
        targets.devices(target)  # refused before anything is printed
    print(versions(*COMPILERS))
    print(
        f"{'target':10} {'pass':17} {'permutes':>8} {'asynchronous':>12} {'hidden':>6} "
        f"{'temporary':>10} {'compiled':>9}  each message, MiB: products meanwhile"
    )
    shape = (1, arguments.length, arguments.heads, arguments.head_dim)
    for target in chosen:
        for name, compile_pass in passes(target, shape, arguments.dtype, arguments.block_size):
            start = time.perf_counter()
            report(f"{target!s:10} {name:17}", compile_pass(), start)


def passes(
    target: targets.Target, shape: tuple[int, int, int, int], dtype: str, block_size: int
) -> list[tuple[str, Callable[[], jax.stages.Compiled]]]:
    """What compiles the forward pass, and the forward and backward pass, for a ring of a target.

    Args:
        target: All its devices make up the ring.
        shape: Of q, k and v: [B, T, H, D].
        dtype: Of q, k and v.
        block_size: As `ring.attention` takes it.

    Raises:
        ring.targets.MissingCompiler: The target's compiler is not installed.
    """
    mesh = ring.make_mesh(ring=target.size, devices=targets.devices(target))
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(None, "ring")))
    attend = functools.partial(
        ring.attention, implementation="ring", mesh=mesh, block_size=block_size
    )

    def both(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout)

    def compiler(function: Callable, operands: int) -> Callable[[], jax.stages.Compiled]:
        jitted = jax.jit(function, compiler_options=targets.compiler_options(target.platform))
        return lambda: jitted.lower(*[x] * operands).compile()

    return [("forward", compiler(attend, 3)), ("forward+backward", compiler(both, 4))]


def report(title: str, program: jax.stages.Compiled, start: float) -> None:
    """Prints the row of one program, compiled since `start`."""
    seconds = time.perf_counter() - start
    permutes = schedule.permutes(program.as_text() or "")
    temporary = getattr(program.memory_analysis(), "temp_size_in_bytes", float("nan")) / 2**20
    each = ", ".join(f"{permute.message / 2**20:.3g}: {permute.products}" for permute in permutes)
    print(
        f"{title} {len(permutes):8} {sum(permute.asynchronous for permute in permutes):12} "
        f"{sum(permute.hidden for permute in permutes):6} "
        f"{temporary:6.1f} MiB {seconds:7.1f} s  {each}",
        flush=True,
    )
