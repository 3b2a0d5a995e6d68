"""The training loop: derived quantities first, then one sharded step after another."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tqdm import tqdm

import ring
from agent import checkpoint, networks, objective, optimizer
from agent.checkpoint import TrainState
from agent.config import TrainConfig
from agent.metrics import MetricsWriter
from agent.sharding import make_mesh
from data.batches import Batch, place
from data.pool import Pool
from data.sampling import ChainSampler
from exorl import EpisodeStore

log = logging.getLogger(__name__)

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


def train(config: TrainConfig) -> Path:
    """Train to the last step, resuming from the run's newest checkpoint if there is one.

    Returns:
        The run's folder.

    Raises:
        ValueError: settings that cannot work, or that differ from the run being resumed.
        FloatingPointError: the loss is no longer finite.
    """
    config.check()
    mesh = make_mesh(config.mesh)
    pool = Pool.load(EpisodeStore(config.data.store), config.data.tasks, config.data.holdout)
    normalizer = pool.normalizer()
    sampler = networks.sampler(config, pool, normalizer)
    extra = {
        "normalizer": normalizer.to_json(),
        "best_returns": {task: pool.best_return(task) for task in pool.tasks},
        "store_fingerprint": pool.store.fingerprint,
    }
    checkpoints = checkpoint.Checkpoints(config.run)
    try:
        with jax.set_mesh(mesh), MetricsWriter(config.run) as metrics:
            state = checkpoints.restore(config, mesh) or checkpoint.initial_state(config, mesh)
            checkpoint.write_config(config)
            for line in describe(config, state, pool, sampler, mesh):
                log.info(line)
            _loop(config, state, sampler, mesh, metrics, checkpoints, extra)
    finally:
        checkpoints.close()
    return config.run


def make_step(config: TrainConfig, mesh: Mesh) -> TrainStep:
    """One update as a jitted function that donates the state; its batch lies on the mesh."""
    structure, _ = networks.abstract_parameters(config, mesh)
    update = optimizer.make(config.optimizer)

    def loss(parameters: nnx.State, batch: Batch, key: jax.Array) -> jax.Array:
        network = nnx.merge(structure, parameters)
        predicted = network(batch, key) if config.model.dropout else network(batch)
        return objective.action_error(predicted, batch)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        value, gradient = jax.value_and_grad(loss)(state.parameters, batch, key)
        change, moments = update.update(gradient, state.optimizer, state.parameters)
        parameters: Any = optax.apply_updates(state.parameters, change)
        norms = {"loss": value, "gradient_norm": optax.tree.norm(gradient)}
        return TrainState(parameters, moments, state.step + 1), norms

    # Wide vectors double XLA:CPU's exp throughput; other backends do not know the option.
    cpu = mesh.devices.flat[0].platform == "cpu"
    options = {"xla_cpu_prefer_vector_width": 512} if cpu else None
    return jax.jit(step, donate_argnums=0, compiler_options=options)


def describe(
    config: TrainConfig,
    state: TrainState,
    pool: Pool,
    sampler: Any,
    mesh: Mesh,
) -> Iterator[str]:
    """Everything that follows from the settings, a line each, before the first step."""
    device = mesh.devices.flat[0]
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    yield f"devices     {mesh.devices.size} × {device.device_kind} ({device.platform}): {axes}"
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.parameters))
    yield f"network     {config.method}, {parameters:,} parameters, float32"
    best = ", ".join(f"{task} {pool.best_return(task):.1f}" for task in pool.tasks)
    yield (
        f"data        {pool.store.path}: {len(pool.training)} training and "
        f"{len(pool.held_out)} held-out episodes; 99 % quantile of returns: {best}"
    )
    if isinstance(sampler, ChainSampler):
        steps = networks.dimensions(config).timesteps
        longest = config.data.trajectories * steps * config.tokens_per_step
        yield (
            f"sequence    {config.model.packing} packing, {config.model.chunk} environment steps a "
            f"step; {config.data.trajectories} trajectories × {steps} steps × "
            f"{config.tokens_per_step} tokens = {longest:,} tokens a chain, "
            f"{-(-longest // config.mesh.ring):,} a device"
        )
        chains = sampler.chains(config.data.trajectories)
        shape = config.model
        flops = chains * ring.cost.training_flops(shape.layers, shape.width, longest)
        yield (
            f"memory      {shape.memory}; {chains} chains of that length a batch, "
            f"{flops / 1e9:.2f} GFLOP a step "
            f"(causal attention counted half, recomputation not counted)"
        )
    else:
        yield f"batch       {sampler.windows} windows of {sampler.window} steps"
    first = int(state.step)
    yield f"run         {config.run}, seed {config.seed}, steps {first} to {config.optimizer.steps}"


def _loop(
    config: TrainConfig,
    state: TrainState,
    sampler: Any,
    mesh: Mesh,
    metrics: MetricsWriter,
    checkpoints: checkpoint.Checkpoints,
    extra: dict[str, Any],
) -> None:
    step_function, learning_rate = make_step(config, mesh), optimizer.schedule(config.optimizer)
    first, last = int(state.step), config.optimizer.steps
    pending: list[dict[str, jax.Array]] = []
    since, tokens = time.perf_counter(), 0
    steps = tqdm(range(first, last), initial=first, total=last, disable=None, desc=config.method)
    for step, batch in zip(steps, batches(sampler, config.seed, first, last), strict=True):
        tokens += batch.order.size * config.tokens_per_step
        state, values = step_function(state, place(batch, mesh))
        pending.append(values)
        done = step + 1
        if done % config.log_every == 0 or done == last:
            record = _averages(pending, done, config)
            elapsed = time.perf_counter() - since
            record["tokens_per_second"] = tokens / elapsed
            record["learning_rate"] = float(np.asarray(learning_rate(step)))
            metrics.write(done, record)
            log.info(_line(done, last, record))
            pending, since, tokens = [], time.perf_counter(), 0
        if done % config.checkpoint_every == 0 or done == last:
            checkpoints.save(state, config, extra)


def batches(sampler: Any, seed: int, first: int, last: int) -> Iterator[Batch]:
    """Host batches of steps first…last−1, one drawn ahead in a thread."""
    with ThreadPoolExecutor(1) as thread:
        ahead = None
        for step in range(first, last):
            batch = ahead.result() if ahead else sampler.batch(seed, step)
            ahead = thread.submit(sampler.batch, seed, step + 1) if step + 1 < last else None
            yield batch


def _averages(pending: list[dict[str, jax.Array]], step: int, config: TrainConfig) -> dict:
    record = {name: float(np.mean([each[name] for each in pending])) for name in pending[0]}
    if not math.isfinite(record["loss"]):
        first = step - len(pending)
        raise FloatingPointError(
            f"the loss is {record['loss']} within steps {first} to {step} (seed {config.seed}); "
            f"last good checkpoint: {checkpoint.latest(config.run)} in {config.run}. "
            f"Lower optimizer.learning_rate or optimizer.clip"
        )
    return record


def _line(step: int, last: int, record: dict[str, float]) -> str:
    return (
        f"step {step:>{len(str(last))}}/{last}  loss {record['loss']:.4f}  "
        f"gradient {record['gradient_norm']:.3f}  lr {record['learning_rate']:.2e}  "
        f"{record['tokens_per_second']:,.0f} tokens/s"
    )
