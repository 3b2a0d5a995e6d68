"""The training loop: derived quantities first, then one sharded step after another."""

import contextlib
import logging
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from agent import checkpoint, networks, objective, optimizer, processes, sharding, throughput
from agent.checkpoint import TrainState
from agent.config import PROFILED_STEPS, TrainConfig
from agent.describe import describe
from agent.interval import Interval
from agent.metrics import MetricsWriter
from agent.validation import Validation
from data.batches import Batch
from data.pool import Pool
from data.sampling import Sampler, placed
from exorl import EpisodeStore

log = logging.getLogger(__name__)

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


def train(config: TrainConfig) -> Path:
    """Train to the last step, resuming from the run's newest checkpoint if there is one.

    Stopped by SIGTERM or SIGINT, it saves and returns as if it were done.

    Returns:
        The run's folder.

    Raises:
        ValueError: settings that cannot work, or that differ from the run being resumed.
        FloatingPointError: the loss is no longer finite.
        LostProcess: another process of the run has ended.
    """
    config.check()
    processes.join()
    mesh = sharding.make_mesh(config.mesh, config.require)  # JAX is used from here on
    pool = Pool.load(EpisodeStore(config.data.store), config.data.tasks, config.data.holdout)
    checkpoints = checkpoint.Checkpoints(config.run)
    try:
        config = checkpoints.resumed(config, pool.store.fingerprint)
        peak = throughput.peak(mesh)
        begin = checkpoint.latest(config.run) or 0
        with jax.set_mesh(mesh), MetricsWriter(config.run, begin) as metrics:
            state = checkpoints.restore(config, mesh) or checkpoint.fresh_state(config, mesh)
            run = Run(config, mesh, pool, checkpoints, metrics, peak)
            if processes.is_first():
                checkpoint.write_config(config)
            for line in describe(config, state, pool, run.sampler, mesh, peak):
                run.say(line)
            run.loop(state)
    except Exception as error:
        if lost := processes.lost(error):
            raise lost from error
        raise
    finally:
        checkpoints.close()
    return config.run


def make_step(config: TrainConfig, mesh: Mesh) -> TrainStep:
    """One update as a jitted function that donates the state; its batch lies on the mesh."""
    structure, _ = networks.abstract_parameters(config, mesh)
    update, learning_rate = optimizer.make(config.optimizer), optimizer.schedule(config.optimizer)
    stored = jax.tree.map(lambda leaf: leaf.sharding, checkpoint.abstract_state(config, mesh))
    edges = objective.edges(networks.dimensions(config).timesteps, config.model.chunk)

    def errors(parameters: nnx.State, batch: Batch, key: jax.Array) -> objective.Errors:
        network: Any = networks.assemble(structure, parameters)
        predicted = network(batch, key) if config.model.dropout else network(batch)
        return objective.action_errors(predicted, batch, edges)

    def gradient_of(
        parameters: nnx.State, batch: Batch, key: jax.Array
    ) -> tuple[objective.Errors, nnx.State]:
        """Errors, and the gradient of their sum."""

        def total(parameters: nnx.State) -> tuple[jax.Array, objective.Errors]:
            found = errors(parameters, batch, key)
            return found.total.sum(), found

        gradient, found = jax.grad(total, has_aux=True)(parameters)
        return found, jax.lax.with_sharding_constraint(gradient, stored.parameters)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        found, gradient = _accumulate(
            lambda part: gradient_of(state.parameters, part, key),
            batch,
            config.optimizer.accumulation,
            mesh,
        )
        gradient = jax.tree.map(lambda leaf: leaf / found.steps, gradient)
        change, moments = update.update(gradient, state.optimizer, state.parameters)
        parameters: Any = optax.apply_updates(state.parameters, change)
        values = {
            "loss": found.mean,
            "error_total": found.total,
            "error_count": found.count,
            "gradient_norm": optax.tree.norm(gradient),
            "update_norm": optax.tree.norm(change),
            "parameter_norm": optax.tree.norm(parameters),
            "learning_rate": learning_rate(state.step),
        }
        return TrainState(parameters, moments, state.step + 1), values

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        step,
        donate_argnums=0,
        out_shardings=(stored, whole),
        compiler_options=sharding.compiler_options(mesh),
    )


def _accumulate(of: Callable[[Batch], Any], batch: Batch, parts: int, mesh: Mesh) -> Any:
    """The sum of a function over equal parts of a batch, one after the other.

    Every device's own rows are split, so none of them moves.
    """
    if parts == 1:
        return of(batch)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]

    def split(array: jax.Array) -> jax.Array:
        rows = array.shape[0] // (shards * parts)
        apart = array.reshape(shards, parts, rows, *array.shape[1:]).swapaxes(0, 1)
        apart = apart.reshape(parts, shards * rows, *array.shape[1:])
        where = PartitionSpec(None, ("data", "fsdp"), "ring")
        return jax.lax.with_sharding_constraint(apart, NamedSharding(mesh, where))

    apart = jax.tree.map(split, batch)
    shapes = jax.eval_shape(of, jax.tree.map(lambda array: array[0], apart))
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add(total: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, of(part)), None

    return jax.lax.scan(add, nothing, apart)[0]


class Drawn(NamedTuple):
    """A training step's batch.

    Attributes:
        batch: on the mesh.
        trajectories: n, in each of its sequences.
        shape: B and S before padding.
    """

    batch: Batch
    trajectories: int
    shape: tuple[int, int]


def batches(
    sampler: Sampler, mesh: Mesh, seed: int, first: int, last: int
) -> Generator[Drawn, None, None]:
    """Batches of steps first…last−1, one drawn and placed ahead in a thread."""

    def draw(step: int) -> Drawn:
        batch = placed(sampler, mesh, seed, step)
        return Drawn(batch, sampler.trajectories_at(seed, step), sampler.shape(seed, step))

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        ahead = None
        for step in range(first, last):
            batch = ahead.result() if ahead else draw(step)
            ahead = thread.submit(draw, step + 1) if step + 1 < last else None
            yield batch


@dataclass(frozen=True)
class Run:
    """All that the loop needs beside the state."""

    config: TrainConfig
    mesh: Mesh
    pool: Pool
    checkpoints: checkpoint.Checkpoints
    metrics: MetricsWriter
    peak: throughput.Peak

    @cached_property
    def sampler(self) -> Sampler:
        """Of training batches."""
        return networks.sampler(self.config, self.pool, self.normalizer)

    @cached_property
    def normalizer(self) -> Any:
        """Of observations."""
        return self.pool.normalizer()

    @cached_property
    def _programs(self) -> dict[tuple[int, ...], Any]:
        return {}

    @cached_property
    def _step(self) -> Any:
        return make_step(self.config, self.mesh)

    def say(self, line: str) -> None:
        """Log a line, once a run."""
        if processes.is_first():
            log.info(line)

    def loop(self, state: TrainState) -> None:
        """From the state's step to the last one, or to where a signal asks to stop."""
        config = self.config
        first, last = int(state.step), config.optimizer.steps
        validation = Validation(config, self.mesh, self.pool, self.normalizer)
        interval = Interval(config, self.sampler, self.peak, self.mesh, last)
        drawn = batches(self.sampler, self.mesh, config.seed, first, last)
        bar = tqdm(
            range(first, last),
            initial=first,
            total=last,
            disable=None if processes.is_first() else True,
            desc=config.method,
        )
        with (
            processes.StopRequest() as stop,
            contextlib.closing(drawn),
            logging_redirect_tqdm(),
            contextlib.ExitStack() as trace,
        ):
            for step, batch in zip(bar, drawn, strict=True):
                state = self._profiled(step - first, state, batch, interval, trace)
                done = step + 1
                stopped = stop.at(done) and done < last
                evaluated = config.evaluate_every and (
                    done % config.evaluate_every == 0 or done == last
                )
                saved = done % config.checkpoint_every == 0 or done == last or stopped
                if done % config.log_every == 0 or evaluated or saved:
                    record = interval.close(done)
                    self.metrics.write(done, record)
                    self.say(interval.line(done, record))
                score = None
                if evaluated:
                    found = validation(state, done)
                    self.metrics.write(done, found.values)
                    self.say(found.line(done, last))
                    score, saved = found.score, True
                if saved:
                    self._save(state, done, score)
                    interval.restart()
                if stopped:
                    self.say(
                        f"stopped by a signal after step {done} of {last}, which is saved in "
                        f"{config.run}; the same command goes on from there"
                    )
                    return

    def _profiled(
        self,
        since: int,
        state: TrainState,
        drawn: Drawn,
        interval: Interval,
        trace: contextlib.ExitStack,
    ) -> TrainState:
        """One step, traced if this is the time for it; ``trace`` ends it with the loop at last."""
        traced = self.config.profile and since in PROFILED_STEPS
        if traced and since == PROFILED_STEPS.start:
            jax.profiler.start_trace(str(self.config.run))
            trace.callback(self._end_trace)
        state = self._update(state, drawn, interval)
        if traced and since == PROFILED_STEPS[-1]:
            jax.block_until_ready(state)
            trace.close()
        return state

    def _end_trace(self) -> None:
        jax.profiler.stop_trace()
        self.say(f"profiled: tensorboard --logdir {self.config.run}")

    def _update(self, state: TrainState, drawn: Drawn, interval: Interval) -> TrainState:
        shape = drawn.batch.order.shape
        if shape not in self._programs:
            start = time.perf_counter()
            compiled = self._step.lower(state, drawn.batch).compile()
            seconds = time.perf_counter() - start
            self._programs[shape] = compiled
            needed = compiled.memory_analysis()
            size = f"; {needed.temp_size_in_bytes / 2**20:,.1f} MiB temporary" if needed else ""
            self.say(
                f"compiled    n = {drawn.trajectories}, {shape[0]} × {shape[1]} steps: "
                f"{seconds:.1f} s{size}"
            )
            interval.pause(time.perf_counter() - start)
        with jax.transfer_guard("disallow"):
            state, values = self._programs[shape](state, drawn.batch)
        interval.add(drawn.trajectories, drawn.shape, values)
        return state

    def _save(self, state: TrainState, step: int, score: float | None) -> None:
        extra = {
            "normalizer": self.normalizer.to_json(),
            "best_returns": {task: self.pool.best_return(task) for task in self.pool.tasks},
            "store_fingerprint": self.pool.store.fingerprint,
        }
        self.checkpoints.save(state, step, self.config, extra, score)
