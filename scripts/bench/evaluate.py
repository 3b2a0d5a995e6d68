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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import ring
from data.packing import Packing
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
    jax.config.update("jax_num_cpu_devices", arguments.ring_size)
    for packing in arguments.packings:
        print(
            f"\n{packing}: {arguments.layers} layers, width {arguments.width}, ring of "
            f"{arguments.ring_size}; ms an environment step\n"
        )
        print(
            "| tokens | recomputed | one device | ring | ÷ recomputed | one read | ring ÷ read | "
            f"{ENVIRONMENTS} environments | ÷ one | attention at rest | rotating |\n"
            + "|---" * 11
            + "|"
        )
        for tokens in arguments.tokens:
            print(row(arguments, packing, tokens), flush=True)
    print(f"\n{demo_rollouts()}")


def agent_of(arguments: argparse.Namespace, packing: Packing, ring_size: int, steps: int) -> Any:
    """An agent with random parameters, for walker."""
    from agent import networks
    from agent.checkpoint import Agent
    from agent.config import DataConfig, MeshConfig, ModelConfig, TrainConfig
    from agent.sharding import make_mesh
    from data.normalize import Normalizer

    config = TrainConfig(
        run=Path("unused"),
        data=DataConfig(
            store=Path("unused"), tasks=("walker_run",), trajectories=1 + -(-steps // 1000)
        ),
        model=ModelConfig(
            packing=packing,
            layers=arguments.layers,
            width=arguments.width,
            heads=arguments.heads,
        ),
        mesh=MeshConfig(ring=ring_size),
    )
    structure, parameters = nnx.split(networks.network(config, jax.random.key(0)))
    normalizer = Normalizer(np.zeros(24, np.float32), np.ones(24, np.float32))
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


def step_of(batch: int) -> Any:
    """A walker step of the sequence whose action is not known yet."""
    from data.batches import Batch

    sizes = {"observation": 24, "action": 6, "previous_action": 6}
    index = ("timestep", "trajectory", "order", "chain")
    values = {
        name: np.zeros((batch, 1), np.int32 if name in index else np.float32)
        if name in (*index, "loss_mask")
        else np.zeros((batch, 1, sizes.get(name, 1)), np.float32)
        for name in Batch._fields
    }
    return Batch(**values)


def acting(policy: Any, batch: int) -> Callable[[], object]:
    """One step of the policy: acting, and taking note of what came of it."""
    step = step_of(batch)

    def act() -> None:
        policy.act(step)
        policy.record(step)

    return act


def row(arguments: argparse.Namespace, packing: Packing, tokens: int) -> str:
    """What a step costs after a context of so many tokens."""
    slots = 1 if packing == "step" else 4
    sharded = agent_of(arguments, packing, arguments.ring_size, tokens // slots)
    whole = agent_of(arguments, packing, 1, tokens // slots)
    policy = policy_of(sharded, 1, tokens)
    calls = {
        "ring": acting(policy, 1),
        "one": acting(policy_of(whole, 1, tokens), 1),
        "many": acting(policy_of(sharded, ENVIRONMENTS, tokens), ENVIRONMENTS),
        "read": reading(sharded.mesh, policy._prefix[0]),
        "rest": attending(sharded, policy._prefix[0], slots, ring.decode_attention),
        "rotating": attending(sharded, policy._prefix[0], slots, None),
    }
    if tokens <= arguments.recompute:
        calls["recomputed"] = recomputing(sharded, tokens)
    found = {name: 1e3 * each.wall for name, each in medians(calls, arguments.repeats).items()}
    mark = ""
    if "recomputed" in found:
        arguments.measured = (tokens, found["recomputed"])
    else:
        of = functools.partial(cost.sequence_flops, arguments.layers, arguments.width)
        known, taken = arguments.measured
        found["recomputed"], mark = taken * of(tokens) / of(known), "~"
    cells = [
        f"{tokens:,}",
        f"{mark}{found['recomputed']:,.0f}",
        f"{found['one']:.1f}",
        f"{found['ring']:.1f}",
        f"{mark}1/{found['recomputed'] / found['ring']:,.0f}",
        f"{found['read']:.1f}",
        f"{found['ring'] / found['read']:.2f}",
        f"{found['many']:.1f}",
        f"{found['many'] / found['ring']:.2f}",
        f"{found['rest']:.1f}",
        f"{found['rotating']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def reading(mesh: Any, cache: Any) -> Callable[[], object]:
    """Every cached key and value once, each device its own."""
    from agent.sharding import compiler_options

    def largest(cache: Any) -> Any:
        return [x.max() for x in (*cache.key, *cache.value)]

    compiled = jax.jit(largest, compiler_options=compiler_options(mesh))
    return lambda: jax.block_until_ready(compiled(cache))


def attending(agent: Any, cache: Any, slots: int, attend: Any) -> Callable[[], object]:
    """The attention of all layers alone, by `ring.decode_attention` or with a rotating cache."""
    from agent.sharding import compiler_options

    model, length = agent.config.model, min(slots, 2)
    q = jnp.ones((1, length, model.heads, model.width // model.heads))
    order = jnp.full((length,), cache.order.shape[-1], jnp.int32)

    def all_layers(cache: Any) -> Any:
        parts = [cache.layer(layer) for layer in range(model.layers)]
        if attend is None:
            return [decoding.rotating(q, order, part, agent.mesh) for part in parts]
        return [attend(q, order, [part], mesh=agent.mesh) for part in parts]

    compiled = jax.jit(all_layers, compiler_options=compiler_options(agent.mesh))
    return lambda: jax.block_until_ready(compiled(cache))


def recomputing(agent: Any, tokens: int) -> Callable[[], object]:
    """The forward pass over the whole context, as without a cache."""
    from agent.sharding import compiler_options
    from data.batches import place

    steps = tokens // agent.config.tokens_per_step
    index = np.arange(steps, dtype=np.int32)[None]
    each = step_of(1)
    batch = type(each)(*(np.repeat(array, steps, axis=1) for array in each))
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
    from agent import networks
    from agent.checkpoint import Agent
    from agent.config import MeshConfig
    from agent.evaluation import episode_seeds
    from agent.history import History
    from agent.policy import ChainPolicy
    from agent.presets import PRESETS
    from agent.protocol import Protocol
    from agent.rollout import rollout
    from agent.sharding import make_mesh
    from data.normalize import Normalizer
    from exorl import Simulation

    task = "cartpole_swingup"
    config = PRESETS["demo"].config(run=Path("unused"), store=Path("unused"), tasks=(task,))
    config = dataclasses.replace(config, mesh=MeshConfig())
    structure, parameters = nnx.split(networks.network(config, jax.random.key(0)))
    normalizer = Normalizer(np.zeros(5, np.float32), np.ones(5, np.float32))
    agent = Agent(
        config, structure, parameters, normalizer, {task: 1000.0}, make_mesh(config.mesh), 0
    )
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
                targets=targets,
                history=history,
            )
            seconds = time.perf_counter() - start
        found.append(f"{batch * 4000 / seconds:,.0f} of {batch}")
    return (
        "demo in cartpole, four episodes in one context (4,000 environment steps, 500 tokens), "
        f"policy and simulation, environment steps a second: {', '.join(found)} in lock step"
    )
