"""Collectors that don't learn: every episode on its own, on all cores."""

import functools
import math

import numpy as np
from tqdm import tqdm

from exorl import suite
from exorl.collect import behaviours, folder
from exorl.collect.config import CollectConfig
from exorl.collect.play import generators, play
from exorl.episodes import write
from exorl.parallel import cores, spread
from exorl.simulation import Simulation
from exorl.tasks import task as find_task

BATCH = 50  # episodes side by side at most: beyond, stepping them gets no faster


def collect(config: CollectConfig) -> int:
    """Makes the missing episodes and returns how many they were."""
    length = find_task(config.task).episode_length
    indices = folder.missing(config.folder, math.ceil(config.steps / length))
    if not indices:
        return 0
    processes = config.processes or min(len(cores()), math.ceil(len(indices) / BATCH))
    parts = max(processes, math.ceil(len(indices) / BATCH))
    batches = [part.tolist() for part in np.array_split(indices, min(parts, len(indices)))]
    name, total = f"{config.task} {config.method}", len(indices)
    with tqdm(desc=name, total=total, unit="episode", disable=None) as bar:
        for made in spread(functools.partial(_collect_batch, config), batches, processes):
            bar.update(made)
    return len(indices)


def _collect_batch(config: CollectConfig, indices: list[int]) -> int:
    simulation, timestep = _simulation(config.task, len(indices))
    task = simulation.task
    shape = (task.episode_length, task.observation_dim, task.action_dim)
    rngs = generators(config.seed, indices)
    starts = [int(rng.integers(2**32)) for rng in rngs]
    chosen = [
        _behaviour(config.method, index)(rng, shape, timestep)
        for index, rng in zip(indices, rngs, strict=True)
    ]
    for index, episode in zip(
        indices, play(simulation, starts, behaviours.act(chosen)), strict=True
    ):
        write(config.folder, index, episode)
    return len(indices)


def _behaviour(method: str, index: int) -> behaviours.Maker:
    if method == "random":
        return behaviours.uniform
    return behaviours.rhythm if index % 2 == 0 else behaviours.network


@functools.lru_cache(maxsize=1)
def _simulation(task: str, size: int) -> tuple[Simulation, float]:
    """A simulation, kept for the next batch, and the seconds its steps take."""
    return Simulation(task, size), suite.load(task, seed=0).control_timestep()
