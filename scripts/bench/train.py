"""A whole training step beside its attention and matrix products alone; what else a step costs.

The step: a network of `--layers` layers around `--ring-size` simulated devices, one chain of
`--tokens`. Beside it, compiled alone on the same mesh: each layer's attention and its matrix
products, forward and backward, rematerialised as in the step. Calls take turns in one process, and
medians are reported. Then what a step costs on the host: drawing and placing a batch of 128
trajectories, and the Python that starts a step.
"""

import argparse
import dataclasses
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import exorl
import ring
from exorl.episodes import write
from scripts.bench.turns import medians


def main(options: Sequence[str]) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench train",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="example: python -m scripts.bench train --tokens 16384 --repeats 3",
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--ring-size", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--trajectories", type=int, default=128, help="of the batch that is drawn")
    parser.add_argument("--repeats", type=int, default=3, help="turns of which the median is taken")
    arguments = parser.parse_args(options)
    ring.simulate_devices(arguments.ring_size)
    print("| tokens | step s | attention s | products s | step ÷ both | copied state bytes |")
    print("|--------|--------|-------------|------------|-------------|--------------------|")
    for tokens in arguments.tokens:
        step_table(arguments, tokens)
    host_table(arguments)


def config_of(arguments: argparse.Namespace, store: Path, **data: Any) -> Any:
    """A training run of the benchmark's network."""
    from agent.config import DataConfig, MeshConfig, ModelConfig, TrainConfig

    return TrainConfig(
        run=Path("unused"),
        data=DataConfig(store=store, tasks=("walker_run",), fixed=True, holdout=0, **data),
        model=ModelConfig(
            packing="rsar",
            layers=arguments.layers,
            width=arguments.width,
            heads=arguments.heads,
            block_size=arguments.block_size,
        ),
        mesh=MeshConfig(ring=arguments.ring_size),
    )


def step_table(arguments: argparse.Namespace, tokens: int) -> None:
    """One row: a step, its attention and its products."""
    from agent import checkpoint, training
    from agent.sharding import make_mesh, shard_bytes

    steps = tokens // 4
    config = config_of(arguments, Path("unused"), trajectories=-(-steps // 1000))
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        state = checkpoint.initial_state(config, mesh)
        batch = random_batch(mesh, steps)
        step = training.make_step(config, mesh).lower(state, batch).compile()
        held = {"state": state}

        def run_step() -> None:
            held["state"], values = step(held["state"], batch)
            jax.block_until_ready(values)

        calls: dict[str, Callable[[], object]] = {
            "step": run_step,
            "attention": attention(arguments, mesh, tokens),
            "products": products(arguments, mesh, tokens),
        }
        found = {name: each.wall for name, each in medians(calls, arguments.repeats).items()}
    alone = arguments.layers * (found["attention"] + found["products"])
    state_bytes = shard_bytes(held["state"])
    copied = state_bytes - step.memory_analysis().alias_size_in_bytes
    print(
        f"| {tokens:,} | {found['step']:.2f} | {arguments.layers * found['attention']:.2f} | "
        f"{arguments.layers * found['products']:.2f} | {found['step'] / alone:.2f} | "
        f"{max(0, copied)} of {state_bytes:,} |"
    )


def random_batch(mesh: Mesh, steps: int) -> Any:
    """One chain of walker-sized steps, laid out around the ring."""
    from data.batches import Batch, place

    rng = np.random.default_rng(0)

    def normal(width: int) -> np.ndarray:
        return rng.normal(size=(1, steps, width)).astype(np.float32)

    index = np.arange(steps, dtype=np.int32)[None]
    last = index >= steps - 1000
    return place(
        Batch(
            *(normal(width) for width in (1, 24, 6, 1, 1, 6, 1, 1)),
            timestep=index % 1000,
            trajectory=index // 1000,
            order=index,
            chain=np.zeros_like(index),
            loss_mask=last.astype(np.float32),
        ),
        mesh,
    )


def _draw(mesh: Mesh, *shape: int, spec: P) -> jax.Array:
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return jax.device_put(values, NamedSharding(mesh, spec))


def attention(arguments: argparse.Namespace, mesh: Mesh, tokens: int) -> Callable[[], object]:
    """One layer's attention, forward and backward, in the step's layout."""
    from agent.sharding import compiler_options

    head_dim = arguments.width // arguments.heads
    q, k, v, dout = (
        _draw(mesh, 1, tokens, arguments.heads, head_dim, spec=P(None, "ring")) for _ in range(4)
    )
    steps = ring.layout.zigzag(tokens // 4, arguments.ring_size)
    order = (steps[:, None] * 4 + np.arange(4)).reshape(-1).astype(np.int32)
    order = jax.device_put(order[None], NamedSharding(mesh, P(None, "ring")))

    def both(q: Any, k: Any, v: Any, dout: Any, order: Any) -> Any:
        out, back = jax.vjp(
            lambda q, k, v: ring.attention(
                q, k, v, implementation="ring", order=order, block_size=arguments.block_size
            ),
            q,
            k,
            v,
        )
        return out, back(dout)

    run = jax.jit(both, compiler_options=compiler_options(mesh))
    return lambda: jax.block_until_ready(run(q, k, v, dout, order))


def products(arguments: argparse.Namespace, mesh: Mesh, tokens: int) -> Callable[[], object]:
    """One layer's matrix products with their backward pass, and what remat computes again."""
    from agent.sharding import compiler_options

    width = arguments.width
    sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    kernels = [_draw(mesh, *size, spec=P()) for size in sizes]
    inputs = [_draw(mesh, 1, tokens, size[0], spec=P(None, "ring")) for size in sizes]

    def both(inputs: Any, kernels: Any) -> Any:
        found = []
        for x, kernel in zip(inputs, kernels, strict=True):
            out, back = jax.vjp(jnp.matmul, x, kernel)
            again = jax.lax.optimization_barrier(x) @ kernel
            found.append((back(again), out.sum()))
        return found

    run = jax.jit(both, compiler_options=compiler_options(mesh))
    return lambda: jax.block_until_ready(run(inputs, kernels))


def host_table(arguments: argparse.Namespace) -> None:
    """What the host does for a step: the batch, and Python."""
    from agent import networks, training
    from agent.sharding import make_mesh
    from data.pool import Pool
    from data.sampling import placed
    from exorl import EpisodeStore

    count = arguments.trajectories
    with tempfile.TemporaryDirectory() as folder:
        store = synthetic(Path(folder), count)
        tokens = count * 4000
        config = config_of(arguments, store, trajectories=count, batch_tokens=tokens, top=1.0)
        mesh = make_mesh(config.mesh)
        pool = Pool.load(EpisodeStore(store), config.data.tasks, 0)
        sampler = networks.sampler(config, pool, pool.normalizer())
        seconds = []
        for step in range(1 + arguments.repeats):
            start = time.perf_counter()
            jax.block_until_ready(placed(sampler, mesh, 0, step))
            seconds.append(time.perf_counter() - start)
        batch = float(np.median(seconds[1:]))
        print(
            f"\ndrawing and placing {count} trajectories ({tokens:,} tokens) on "
            f"{arguments.ring_size} devices: {1e3 * batch:.1f} ms, ahead of the step in a thread"
        )
        overhead = python_overhead(training, config, store)
        print(
            "the loop's own thread (starting steps, metrics, signals, progress): "
            f"{overhead:.2f} ms of processor time a step"
        )


def python_overhead(training: Any, config: Any, store: Path) -> float:
    """Milliseconds that the loop's thread computes for a step whose network is next to nothing."""
    from agent.config import MeshConfig, ModelConfig, OptimizerConfig

    logging.getLogger("agent").setLevel(logging.WARNING)
    seconds = {}
    for steps in (200, 2_200):
        small = dataclasses.replace(
            config,
            run=store.parent / f"run{steps}",
            method="bc",
            data=dataclasses.replace(config.data, batch_tokens=1),
            model=ModelConfig(layers=1, width=4),
            mesh=MeshConfig(),
            optimizer=OptimizerConfig(steps=steps),
            log_every=100,
            checkpoint_every=steps,
        )
        start = time.thread_time()
        training.train(small)
        seconds[steps] = time.thread_time() - start
    return 1e3 * (seconds[2_200] - seconds[200]) / 2_000


def synthetic(folder: Path, count: int) -> Path:
    """A packed store of walker episodes in numbers of the right shape, which nobody acted out."""
    rng = np.random.default_rng(0)
    for index in range(count):
        physics = rng.normal(size=(1001, 18))
        physics[:, 1] = rng.uniform(0, 1, 1001)
        episode = exorl.Episode(
            observation=rng.normal(size=(1001, 24)).astype(np.float32),
            action=np.clip(rng.normal(size=(1001, 6)), -1, 1).astype(np.float32),
            reward=np.zeros((1001, 1), np.float32),
            discount=np.ones((1001, 1), np.float32),
            physics=physics,
        )
        write(folder / "episodes", index, episode)
    return exorl.pack([folder / "episodes"], folder / "store", domain="walker").path
