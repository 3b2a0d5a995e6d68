"""Times the three ways to compute attention: dense, blockwise, and a ring of simulated devices.

All run in one process and take turns, so that whatever else the machine does hits them alike;
medians are reported. GFLOP/s count causal attention half and recomputation in the backward pass in
full (3.5 times the forward pass).
"""

import argparse
import functools
from collections.abc import Callable, Sequence

import jax
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ring
from ring import cost
from scripts.bench.turns import medians

IMPLEMENTATIONS: tuple[ring.Implementation, ...] = ("dense", "blockwise", "ring")
PASSES = ("forward", "forward+backward")


def main(options: Sequence[str]) -> None:
    """Prints one table; dense is left out beyond `--dense-limit`."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench ring",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="example: python -m scripts.bench ring --lengths 4096 16384 --repeats 5",
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096], help="tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--ring-size", type=int, default=8, help="devices, simulated on a CPU")
    parser.add_argument("--repeats", type=int, default=5, help="turns of which the median is taken")
    parser.add_argument("--dense-limit", type=int, default=8192, help="longest length for dense")
    arguments = parser.parse_args(options)
    jax.config.update("jax_num_cpu_devices", arguments.ring_size)
    print(
        f"{'length':>7} {'pass':17} {'implementation':15} {'ms':>9} {'GFLOP/s':>8} {'× dense':>8}"
    )
    for length in arguments.lengths:
        measure(length, arguments)


def measure(length: int, arguments: argparse.Namespace) -> None:
    """Prints the rows of one length."""
    calls = {}
    for implementation in IMPLEMENTATIONS:
        if implementation != "dense" or length <= arguments.dense_limit:
            for name, call in compiled(implementation, length, arguments).items():
                calls[name, implementation] = call
    seconds = medians(calls, arguments.repeats)
    for name in PASSES:
        flops = cost.attention_flops(
            arguments.batch, length, arguments.heads, arguments.head_dim, backward=name != "forward"
        )
        for implementation in IMPLEMENTATIONS:
            if (name, implementation) in seconds:
                taken = seconds[name, implementation]
                ratio = seconds.get((name, "dense"), float("nan")) / taken
                print(
                    f"{length:7} {name:17} {implementation:15} "
                    f"{1e3 * taken:9.2f} {flops / taken / 1e9:8.1f} {ratio:8.2f}"
                )


def compiled(
    implementation: ring.Implementation, length: int, arguments: argparse.Namespace
) -> dict[str, Callable[[], object]]:
    """The forward and the forward and backward pass, warmed up, on their own devices' data."""
    mesh = ring.make_mesh(ring=arguments.ring_size if implementation == "ring" else 1)
    sharding = NamedSharding(mesh, P(None, "ring"))
    shape = (arguments.batch, length, arguments.heads, arguments.head_dim)
    q, k, v, dout = (
        jax.device_put(jax.random.normal(key, shape, arguments.dtype), sharding)
        for key in jax.random.split(jax.random.key(0), 4)
    )
    attend = functools.partial(
        ring.attention, implementation=implementation, mesh=mesh, block_size=arguments.block_size
    )

    def both(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout)

    wide = {"xla_cpu_prefer_vector_width": 512} if jax.default_backend() == "cpu" else {}
    forward = jax.jit(attend, compiler_options=wide)
    backward = jax.jit(both, compiler_options=wide)
    return {
        PASSES[0]: lambda: jax.block_until_ready(forward(q, k, v)),
        PASSES[1]: lambda: jax.block_until_ready(backward(q, k, v, dout)),
    }
