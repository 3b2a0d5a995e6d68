"""What acting costs an environment step, by the length of the context.

A network of `--layers` layers acts in one environment after a context of so many tokens, which lie
in the cache of `--ring-size` simulated devices. Beside it, in the same process and taking turns:
the full forward pass over the whole context instead of a cache (measured to `--recompute` tokens,
and extrapolated by its operations beyond, marked ~); the cache whole on one device; reading every
cached key and value once, which is the least a step can take; sixteen environments under the same
context; and the attention of all layers with a cache at rest, and with one that travels around the
ring. Last, rollouts of the demo's network with simulation. Times do not depend on what parameters
and caches hold.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import ring
from data.packing import SLOTS, Packing
from ring import cost
from scripts.bench import decoding
from scripts.bench.turns import medians

ENVIRONMENTS = 16


def main(options: Sequence[str]) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench evaluate",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="example: python -m scripts.bench evaluate --tokens 4096 --packings step",
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768, 131072, 524288])
    parser.add_argument("--packings", nargs="+", default=["step", "rsar"])
    parser.add_argument("--recompute", type=int, default=32768, help="most tokens recomputed")
    parser.add_argument("--ring-size", type=int, default=2)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5, help="turns of which the median is taken")
    arguments = parser.parse_args(options)
    ring.simulate_devices(arguments.ring_size)
    for packing in arguments.packings:
        print(
            f"\n{packing}: {arguments.layers} layers, width {arguments.width}, ring of "
            f"{arguments.ring_size}; ms an environment step\n"
        )
        print(
            "| tokens | recomputed | one device | ring | recomputed ÷ ring | one read | "
            f"ring ÷ read | {ENVIRONMENTS} environments | ÷ one | attention at rest | rotating |\n"
            + "|---" * 11
            + "|"
        )
        known = None
        for tokens in arguments.tokens:
            line, known = row(arguments, packing, tokens, known)
            print(line, flush=True)
    print(f"\n{demo_rollouts()}")


def agent_of(arguments: argparse.Namespace, packing: Packing, ring_size: int, steps: int) -> Any:
    """An agent with random parameters, for walker."""
    from agent.config import DataConfig, MeshConfig, ModelConfig, TrainConfig

    trajectories = 1 + -(-steps // 1000)
    unused = Path("unused")
    return untrained(
        TrainConfig(
            run=unused,
            data=DataConfig(store=unused, tasks=("walker_run",), trajectories=trajectories),
            model=ModelConfig(
                packing=packing,
                layers=arguments.layers,
                width=arguments.width,
                heads=arguments.heads,
            ),
            mesh=MeshConfig(ring=ring_size),
        )
    )


def untrained(config: Any) -> Any:
    """An agent with random parameters."""
    from agent import networks
    from agent.checkpoint import Agent
    from agent.sharding import make_mesh
    from data.normalize import Normalizer

    structure, parameters = nnx.split(networks.network(config, jax.random.key(0)))
    size = networks.dimensions(config).observation
    normalizer = Normalizer(np.zeros(size, np.float32), np.ones(size, np.float32))
    return Agent(config, structure, parameters, normalizer, {}, make_mesh(config.mesh), 0)


def policy_of(agent: Any, batch: int, tokens: int) -> Any:
    """A policy after a context of so many tokens that all its environments share."""
    from agent import cache as caches
    from agent.policy import ChainPolicy

    policy, model = ChainPolicy(agent, batch=batch, steps=1000), agent.config.model
    with jax.set_mesh(agent.mesh):
        prefix = caches.empty(
            agent.mesh,
            layers=model.layers,
            batch=1,
            rows=tokens,
            heads=model.heads,
            head_dim=model.width // model.heads,
            dtype=model.dtype,
            segmented=False,
        )
        order = jax.device_put(np.arange(tokens, dtype=np.int32), prefix.order.sharding)
    policy._prefix = (prefix._replace(order=order),)
    policy._first = tokens // agent.config.tokens_per_step
    return policy


def zeros_of(agent: Any, rows: int, steps: int) -> Any:
    """A batch of zeros: times do not depend on it."""
    from agent.ahead import abstract_batch

    shapes = abstract_batch(agent.config, agent.mesh, rows, steps)
    return jax.tree.map(lambda each: np.zeros(each.shape, each.dtype), shapes)


def acting(agent: Any, tokens: int, batch: int = 1) -> Callable[[], object]:
    """One step after a context: acting, and taking note of what came of it."""
    policy, step = policy_of(agent, batch, tokens), zeros_of(agent, batch, 1)

    def act() -> None:
        policy.act(step)
        policy.record(step)

    return act


class Recomputed(NamedTuple):
    """What the full forward pass took at the longest context it was measured at."""

    tokens: int
    milliseconds: float


def row(
    arguments: argparse.Namespace, packing: Packing, tokens: int, known: Recomputed | None
) -> tuple[str, Recomputed]:
    """What a step costs after a context of so many tokens."""
    slots = len(SLOTS[packing])
    sharded = agent_of(arguments, packing, arguments.ring_size, tokens // slots)
    whole = agent_of(arguments, packing, 1, tokens // slots)
    cache = policy_of(sharded, 1, tokens)._prefix[0]
    calls = {
        "ring": acting(sharded, tokens),
        "one": acting(whole, tokens),
        "many": acting(sharded, tokens, ENVIRONMENTS),
        "read": reading(sharded.mesh, cache),
        "rest": attending(
            sharded, cache, lambda q, at, kv: ring.decode_attention(q, at, [kv], mesh=sharded.mesh)
        ),
        "rotating": attending(
            sharded, cache, lambda q, at, kv: decoding.rotating(q, at, kv, sharded.mesh)
        ),
    }
    if known is None or tokens <= arguments.recompute:
        calls["recomputed"] = recomputing(sharded, tokens)
    found = {name: 1e3 * each.wall for name, each in medians(calls, arguments.repeats).items()}
    mark = ""
    if known is None or "recomputed" in found:
        known = Recomputed(tokens, found["recomputed"])
    else:
        of = functools.partial(cost.sequence_flops, arguments.layers, arguments.width)
        found["recomputed"] = known.milliseconds * of(tokens) / of(known.tokens)
        mark = "~"
    cells = [
        f"{tokens:,}",
        f"{mark}{found['recomputed']:,.0f}",
        f"{found['one']:.1f}",
        f"{found['ring']:.1f}",
        f"{mark}{found['recomputed'] / found['ring']:,.0f}",
        f"{found['read']:.1f}",
        f"{found['ring'] / found['read']:.2f}",
        f"{found['many']:.1f}",
        f"{found['many'] / found['ring']:.2f}",
        f"{found['rest']:.1f}",
        f"{found['rotating']:.1f}",
    ]
    return f"| {' | '.join(cells)} |", known


def reading(mesh: Any, cache: Any) -> Callable[[], object]:
    """Every cached key and value once, each device its own."""
    from agent.sharding import compiler_options

    def largest(cache: Any) -> Any:
        return [x.max() for x in (*cache.key, *cache.value)]

    compiled = jax.jit(largest, compiler_options=compiler_options(mesh))
    return lambda: jax.block_until_ready(compiled(cache))


def attending(
    agent: Any, cache: Any, attend: Callable[[jax.Array, jax.Array, ring.KV], jax.Array]
) -> Callable[[], object]:
    """The attention of all layers alone."""
    from agent.sharding import compiler_options

    model = agent.config.model
    length = min(agent.config.tokens_per_step, 2)  # acting takes no more
    q = jnp.ones((1, length, model.heads, model.width // model.heads))
    order = jnp.full((length,), cache.order.shape[-1], jnp.int32)

    def all_layers(cache: Any) -> Any:
        return [attend(q, order, cache.layer(layer)) for layer in range(model.layers)]

    compiled = jax.jit(all_layers, compiler_options=compiler_options(agent.mesh))
    return lambda: jax.block_until_ready(compiled(cache))


def recomputing(agent: Any, tokens: int) -> Callable[[], object]:
    """The forward pass over the whole context, as without a cache."""
    from agent.sharding import compiler_options
    from data.batches import place

    steps = tokens // agent.config.tokens_per_step
    index = np.arange(steps, dtype=np.int32)[None]
    batch = zeros_of(agent, 1, steps)
    batch = batch._replace(timestep=index % 1000, trajectory=index // 1000, order=index)
    with jax.set_mesh(agent.mesh):
        placed = place(batch, agent.mesh)

        def forward(parameters: Any, batch: Any) -> Any:
            return nnx.merge(agent.structure, parameters)(batch)

        compiled = jax.jit(forward, compiler_options=compiler_options(agent.mesh))
        program = compiled.lower(agent.parameters, placed).compile()
    return lambda: jax.block_until_ready(program(agent.parameters, placed))


def demo_rollouts() -> str:
    """Environment steps a second of the demo's network in cartpole, four episodes a context."""
    from agent.config import MeshConfig
    from agent.evaluation import episode_seeds
    from agent.history import History
    from agent.policy import ChainPolicy
    from agent.presets import PRESETS
    from agent.protocol import Protocol
    from agent.rollout import rollout
    from exorl import Simulation

    task = "cartpole_swingup"
    config = PRESETS["demo"].config(run=Path("unused"), store=Path("unused"), tasks=(task,))
    config = dataclasses.replace(config, mesh=MeshConfig())
    agent = untrained(config)
    found = []
    for batch in (1, 20):
        policy = ChainPolicy(agent, batch=batch, steps=4 * 125)
        seeds = np.concatenate([episode_seeds(0, chain, 1, 4) for chain in range(batch)])
        targets, protocol = np.ones(batch), Protocol("self", 4)
        for _ in range(2):  # the first compiles
            start = time.perf_counter()
            history = History(agent, policy, protocol, targets, [])
            rollout(
                agent,
                policy,
                Simulation(task, batch),
                seeds,
                scale=1000.0,
                history=history,
            )
            seconds = time.perf_counter() - start
        found.append(f"{batch * 4000 / seconds:,.0f} of {batch}")
    return (
        "demo in cartpole, four episodes in one context (4,000 environment steps, 500 tokens), "
        f"policy and simulation, environment steps a second: {', '.join(found)} in lock step"
    )
