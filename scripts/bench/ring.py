"""Exact attention against its peers: time, memory, packed segments, decoding. Causal throughout.

All ways of a table take turns in one process, with the same compiler options, and medians are
reported. GFLOP/s count causal attention half and recomputation in the backward pass in full (3.5
times the forward pass); `share` is of the rate of a float32 matrix product, measured beside. `cpu`
is the time of all cores together: where it is near cores × ms, nothing waits. Devices of the ring
are simulated on a CPU. The peers: `jax.nn.dot_product_attention`, PyTorch's if it is installed, and
ringattention 0.1.2 with each chunk size, if `--peers` holds it (`make bench` puts it there). Rows
of ours have their block size beside them; `× best` is against the fastest of them in float32.
"""

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ring
from ring import cost
from scripts.bench import decoding, peers
from scripts.bench.turns import medians

TABLES = ("device", "ring", "segments", "memory", "decoding")
CHUNKS = (128, 256, 512)

Calls = dict[str, Callable[[], object]]


def main(options: Sequence[str]) -> None:
    """Prints the tables asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench ring",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="example: python -m scripts.bench ring --tables ring --tokens 16384 --repeats 5",
    )
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--tokens", type=int, default=16384, help="two heads; twice for one head")
    parser.add_argument("--ring-size", type=int, default=8)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[256, 512], help="ours")
    parser.add_argument("--repeats", type=int, default=3, help="turns of which the median is taken")
    parser.add_argument("--peers", type=Path, help="folder with ringattention")
    arguments = parser.parse_args(options)
    if "device" in arguments.tables and len(arguments.tables) > 1:
        # Simulated devices share the cores out among them, so one device is timed without.
        alone = [*options, "--tables", "device"]
        subprocess.run([sys.executable, "-m", "scripts.bench", "ring", *alone], check=True)
        arguments.tables.remove("device")
    if arguments.tables != ["device"]:
        ring.simulate_devices(arguments.ring_size)
    tables = dict(zip(TABLES, (device, around, segments, memory, decode), strict=True))
    for table in arguments.tables:
        tables[table](arguments)


def device(arguments: argparse.Namespace) -> None:
    """One device, half as many tokens, four heads."""
    length, heads = arguments.tokens // 2, 4
    operands = draw(None, length, heads)
    for backward in (False, True):
        calls = {}
        for size in arguments.block_sizes:
            ours = functools.partial(ring.attention, implementation="blockwise", block_size=size)
            calls[f"float32, {size}"] = compiled(ours, operands, backward)
            calls[f"bfloat16, {size}"] = compiled(ours, cast(operands), backward)
        calls["jax.nn"] = compiled(peers.dot_product_attention, operands, backward)
        torch = peers.torch_sdpa(operands, backward)
        if torch is not None:
            calls["torch"] = torch
        print_times("one device", calls, length, heads, backward, arguments.repeats)


def around(arguments: argparse.Namespace) -> None:
    """A ring of simulated devices, beside the Ring Attention authors' package."""
    mesh = ring.make_mesh(ring=arguments.ring_size)
    for length, heads in ((arguments.tokens, 2), (2 * arguments.tokens, 1)):
        operands = draw(mesh, length, heads)
        for backward in (False, True):
            calls = {}
            for size in arguments.block_sizes:
                ours = around_the_ring(mesh, size)
                calls[f"float32, {size}"] = compiled(ours, operands, backward)
                calls[f"bfloat16, {size}"] = compiled(ours, cast(operands), backward)
            for chunk, attend in _peers(arguments, mesh).items():
                calls[f"ringattention, {chunk}"] = compiled(attend, operands, backward)
            title = f"ring of {arguments.ring_size}"
            print_times(title, calls, length, heads, backward, arguments.repeats)


def segments(arguments: argparse.Namespace) -> None:
    """What packing saves: sixteen equal segments against none."""
    length, heads = arguments.tokens, 2
    packed = np.arange(length, dtype=np.int32) // -(-length // 16)
    mesh, size = ring.make_mesh(ring=arguments.ring_size), arguments.block_sizes[-1]
    alone = functools.partial(ring.attention, implementation="blockwise", block_size=size)
    ways: dict[str, tuple[Any, Mesh | None]] = {
        "one device": (alone, None),
        f"ring of {arguments.ring_size}": (around_the_ring(mesh, size), mesh),
    }
    print(f"\n16 segments of {length} tokens, {heads} heads: ms, and the share of it without any")
    for name, (attend, over) in ways.items():
        operands = draw(over, length, heads)
        for backward in (False, True):
            calls = {
                "none": compiled(attend, operands, backward),
                "16": compiled(functools.partial(attend, segments=packed), operands, backward),
            }
            taken = medians(calls, arguments.repeats)
            less = taken["none"].wall / taken["16"].wall
            print(
                f"{name:12} {_pass(backward):17} {1e3 * taken['none'].wall:8.0f} → "
                f"{1e3 * taken['16'].wall:6.0f}  (1/{less:.1f})"
            )


def memory(arguments: argparse.Namespace) -> None:
    """Temporary memory that the compiler reserves on each device, beside inputs and outputs."""
    length, heads = 2 * arguments.tokens, 1
    mesh = ring.make_mesh(ring=arguments.ring_size)
    ways: dict[str, Any] = {
        f"ring, blocks of {size}": around_the_ring(mesh, size) for size in arguments.block_sizes
    }
    for chunk, attend in _peers(arguments, mesh).items():
        ways[f"ringattention, {chunk}"] = attend
    operands = draw(mesh, length, heads)
    print(f"\nMiB of temporary memory a device, {length} tokens, {heads} head, forward and both")
    for name, attend in ways.items():
        found = [
            program(attend, operands, backward).memory_analysis().temp_size_in_bytes / 2**20
            for backward in (False, True)
        ]
        print(f"{name:24}" + "".join(f"{size:8.1f}" for size in found))


def decode(arguments: argparse.Namespace) -> None:
    """One step's four tokens against a full cache, of all heads that four steps of it have."""
    capacity, heads = 2 * arguments.tokens, 4
    mesh = ring.make_mesh(ring=arguments.ring_size)
    _, k, v, _ = draw(mesh, capacity, heads)
    order = jax.device_put(jnp.arange(capacity), NamedSharding(mesh, P("ring")))
    cache = jax.jit(ring.KV.of)(k, v, order)
    q, place = jnp.ones((1, 4, heads, 64)), jnp.arange(capacity - 4, capacity)
    still = jax.jit(functools.partial(ring.decode_attention, mesh=mesh))
    moving = jax.jit(functools.partial(decoding.rotating, mesh=mesh))
    taken = medians(
        {
            "cache at rest": lambda: jax.block_until_ready(still(q, place, [cache])),
            "cache rotating": lambda: jax.block_until_ready(moving(q, place, cache)),
        },
        arguments.repeats,
    )
    print(f"\nDecoding 4 tokens against {capacity}, {heads} heads of 64, ring of {mesh.size}")
    for name, each in taken.items():
        print(f"{name:24}{1e3 * each.wall:9.2f} ms")


def print_times(
    title: str, calls: Calls, length: int, heads: int, backward: bool, repeats: int
) -> None:
    """Times the calls, and a matrix product beside them."""
    matrix = jnp.ones((1024, 1024), jnp.float32)
    product = jax.jit(jnp.matmul)
    taken = medians(
        calls | {"matmul": lambda: jax.block_until_ready(product(matrix, matrix))}, repeats
    )
    rate = 2 * 1024**3 / taken.pop("matmul").wall
    flops = cost.attention_flops(1, length, heads, 64, backward=backward)
    print(f"\n{title}, {length} tokens, {heads} heads of 64, {_pass(backward)}")
    print(f"float32 matrix products at {rate / 1e9:.0f} GFLOP/s")
    print(f"{'':24}{'ms':>9}{'cpu':>9}{'GFLOP/s':>9}{'share':>7}{'× best':>8}")
    best = min(each.wall for name, each in taken.items() if name.startswith("float32"))
    for name, each in taken.items():
        print(
            f"{name:24}{1e3 * each.wall:9.0f}{1e3 * each.cpu:9.0f}{flops / each.wall / 1e9:9.1f}"
            f"{flops / each.wall / rate:7.0%}{each.wall / best:8.2f}"
        )


def draw(mesh: Mesh | None, length: int, heads: int) -> list[Array]:
    """q, k, v and the cotangent [1, T, H, 64] float32, on their devices."""
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (1, length, heads, 64)) for key in keys]
    if mesh is None:
        return arrays
    return [jax.device_put(x, NamedSharding(mesh, P(None, "ring"))) for x in arrays]


def cast(arrays: list[Array]) -> list[Array]:
    """The same in bfloat16."""
    return [x.astype(jnp.bfloat16) for x in arrays]


def around_the_ring(mesh: Mesh, block_size: int) -> Any:
    """Our ring attention over a mesh."""
    return functools.partial(
        ring.attention, implementation="ring", mesh=mesh, block_size=block_size
    )


def program(attend: Any, operands: list[Array], backward: bool) -> Any:
    """The forward pass, or both passes, compiled."""

    def both(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, ...]:
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout)

    wide = {"xla_cpu_prefer_vector_width": 512} if jax.default_backend() == "cpu" else {}
    function, given = (both, operands) if backward else (attend, operands[:3])
    return jax.jit(function, compiler_options=wide).lower(*given).compile()


def compiled(attend: Any, operands: list[Array], backward: bool) -> Callable[[], object]:
    """A call of it."""
    run, given = program(attend, operands, backward), operands if backward else operands[:3]
    return lambda: jax.block_until_ready(run(*given))


def _peers(arguments: argparse.Namespace, mesh: Mesh) -> dict[int, peers.Attend]:
    if arguments.peers is None:
        return {}
    return {chunk: peers.ringattention(arguments.peers, mesh, chunk) for chunk in CHUNKS}


def _pass(backward: bool) -> str:
    return "forward+backward" if backward else "forward"
