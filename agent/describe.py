"""Everything that follows from a run's settings, said before its first step."""

from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from agent import networks, sharding, throughput
from agent.checkpoint import TrainState
from agent.config import TrainConfig
from data.batches import positions
from data.packing import SLOTS
from data.pool import Pool
from data.sampling import ChainSampler, Sampler


def describe(
    config: TrainConfig,
    state: TrainState,
    pool: Pool,
    sampler: Sampler,
    mesh: Mesh,
    peak: throughput.Peak,
) -> Iterator[str]:
    """A line for each of: devices, network, data, sequence, memory, speed, run."""
    device = mesh.devices.flat[0]
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items())
    yield f"devices     {mesh.devices.size} × {device.device_kind} ({device.platform}): {axes}" + (
        f"; {jax.process_count()} processes" if jax.process_count() > 1 else ""
    )
    options = sharding.compiler_options(mesh) or {}
    if options:
        yield "compiler    " + ", ".join(f"{name}={value}" for name, value in options.items())
    parameters = networks.parameter_count(config, mesh)
    held = sharding.shard_bytes((state.parameters, state.optimizer))
    yield (
        f"network     {config.method}, {parameters:,} parameters, float32, computed in "
        f"{config.model.dtype}; with moments {held / 2**20:,.1f} MiB a device"
    )
    best = ", ".join(f"{task} {pool.best_return(task):.1f}" for task in pool.tasks)
    yield (
        f"data        {pool.store.path}: {len(pool.training)} training and "
        f"{len(pool.held_out)} held-out episodes; 99 % quantile of returns: {best}"
    )
    if isinstance(sampler, ChainSampler):
        yield from _sequence(config, sampler, parameters)
    else:
        rows, steps = sampler.shape(config.seed, 0)
        yield f"batch       {rows} windows of {steps} steps"
    rate = peak.flops_per_second / 1e12
    yield f"speed       MFU is relative to {rate:.3g} TFLOP/s: {peak.source}"
    first = int(state.step)
    yield f"run         {config.run}, seed {config.seed}, steps {first} to {config.optimizer.steps}"


def _sequence(config: TrainConfig, sampler: ChainSampler, parameters: int) -> Iterator[str]:
    slots = len(SLOTS[config.model.packing])
    steps = sampler.trajectories * sampler.steps
    here = len(positions(steps, config.mesh.ring, sampler.layout)) // config.mesh.ring
    dims = networks.dimensions(config)
    yield (
        f"sequence    {config.model.packing} packing, {config.model.chunk} environment steps a "
        f"step; {sampler.trajectories} trajectories × {sampler.steps} steps × {slots} tokens = "
        f"{steps * slots:,} tokens a chain, {here * slots:,} a device "
        f"({sampler.layout}); {dims.observation} observations and {dims.action} actions a step"
    )
    chains = sampler.chains(sampler.trajectories)
    flops = throughput.step_flops(config, parameters, chains, steps)
    parts = config.optimizer.accumulation
    yield (
        f"memory      {config.model.memory}; {chains} chains of that length a batch"
        + (f" in {parts} parts" if parts > 1 else "")
        + f", {flops / 1e9:,.2f} GFLOP a step (causal attention counted half, recomputation not)"
    )
