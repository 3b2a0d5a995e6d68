"""One training step of real episodes around a ring and by bpt: the same loss, the same gradients.

The network of the preset `at_small_128`, both times with the same parameters and the same chain of
`--trajectories`; the ring over `--ring-size` simulated devices, bpt on one of them.
"""

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax

import ring
from agent.config import MeshConfig, TrainConfig
from agent.presets import PRESETS


class Step(NamedTuple):
    """What a step computed.

    Attributes:
        loss: of the batch.
        gradient: of all parameters in one vector, float64.
        seconds: that it took, compiled.
    """

    loss: float
    gradient: np.ndarray
    seconds: float


class Apart(NamedTuple):
    """How far a ring's step is from bpt's.

    Attributes:
        loss: difference over the loss.
        gradient: norm of the difference over the gradient's norm.
        largest: largest difference of an element over the largest element.
    """

    loss: float
    gradient: float
    largest: float


def main(options: Sequence[str]) -> None:
    """Prints both steps and how far they are apart."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench parity",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="example: python -m scripts.bench parity --store STORE --task cheetah_run",
    )
    parser.add_argument("--store", type=Path, required=True, help="packed episodes")
    parser.add_argument("--task", required=True)
    parser.add_argument("--trajectories", type=int, default=8, help="n of the chain")
    parser.add_argument("--ring-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="of parameters and chain")
    arguments = parser.parse_args(options)
    ring.simulate_devices(arguments.ring_size)
    config = config_of(
        arguments.store, arguments.task, arguments.trajectories, arguments.ring_size, arguments.seed
    )
    around, alone = step(config), step(by_bpt(config))
    for name, each in (("ring", around), ("bpt", alone)):
        print(f"{name:5} loss {each.loss:.9f}  {each.seconds:.1f} s")
    found = apart(around, alone)
    print(
        f"apart by {found.loss:.1e} of the loss, {found.gradient:.1e} of the gradients' norm and "
        f"{found.largest:.1e} of their largest element"
    )


def config_of(store: Path, task: str, trajectories: int, ring_size: int, seed: int) -> TrainConfig:
    """A run whose batches are one chain of n trajectories."""
    made = PRESETS["at_small_128"].config(run=Path("none"), store=store, tasks=(task,))
    data = dataclasses.replace(made.data, trajectories=trajectories, fixed=True, batch_tokens=1)
    optimizer = dataclasses.replace(made.optimizer, clip=1e9)  # so that its size counts
    mesh = MeshConfig(ring=ring_size)
    return dataclasses.replace(made, data=data, optimizer=optimizer, mesh=mesh, seed=seed)


def by_bpt(config: TrainConfig) -> TrainConfig:
    """The same run on one device."""
    model = dataclasses.replace(config.model, memory="bpt")
    return dataclasses.replace(config, model=model, mesh=MeshConfig())


def step(config: TrainConfig) -> Step:
    """The first step of a run."""
    from agent import checkpoint, networks, training
    from agent.sharding import make_mesh
    from data.pool import Pool
    from data.sampling import placed
    from exorl import EpisodeStore

    pool = Pool.load(EpisodeStore(config.data.store), config.data.tasks, config.data.holdout)
    sampler, mesh = networks.sampler(config, pool, pool.normalizer()), make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        state = checkpoint.initial_state(config, mesh)
        batch = placed(sampler, mesh, config.seed, 0)
        program = training.make_step(config, mesh).lower(state, batch).compile()
        start = time.perf_counter()
        state, values = jax.block_until_ready(program(state, batch))
        seconds = time.perf_counter() - start
    # Adam's first moment starts at zero: after one step it is a tenth of the gradient.
    moments = jax.tree.leaves(optax.tree.get(state.optimizer, "mu"))
    gradient = [np.asarray(leaf, np.float64).ravel() for leaf in moments]
    return Step(float(values["loss"]), 10 * np.concatenate(gradient), seconds)


def apart(ours: Step, theirs: Step) -> Apart:
    """See `Apart`; relative to theirs."""
    difference = ours.gradient - theirs.gradient
    return Apart(
        loss=abs(ours.loss - theirs.loss) / theirs.loss,
        gradient=float(np.linalg.norm(difference) / np.linalg.norm(theirs.gradient)),
        largest=float(np.abs(difference).max() / np.abs(theirs.gradient).max()),
    )
