"""Recall against length: what a transformer finds again of what its context showed once.

Chains as `data.recall` makes them: every step of the context shows a key and a value, the last
trajectory asks for 250 of the values, evenly over all distances. The network of the preset
`at_step` is trained around a ring by a curriculum up to `--trained` tokens, and asked, on chains it
has not seen, at lengths up to 16 times that. Modes:

  ring   the ring that trained it
  bpt    the same parameters on one device, for the first seed: the same answers, up to rounding
  own    another network, trained alike, that attends within trajectories only: chance

Agents are kept in `--run`, answers in `recall.csv` as they are given, so that the command may be
stopped and given again. A chain of 128,000 tokens takes one to two minutes on two cores.
"""

import argparse
import dataclasses
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import ring
from agent import checkpoint, networks, sharding, training
from agent.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig
from agent.presets import PRESETS
from data.batches import Batch
from data.recall import RecallSampler
from data.sampling import placed
from scripts.bench import recall_report
from scripts.bench.recall_report import LENGTH, LENGTHS, MODES, NAMES, PARTS, Answers

TASK = "jaco_reach_top_left"
"""Observations of 42 numbers hold a key of 32 bits, a value of 9 and a mark."""
LONGEST = 512  # trajectories in a chain; shorter ones are told indices with gaps
ASKING = 10**6
"""Training steps are numbered from 0, chains that are asked from here."""


class Stage(NamedTuple):
    """Part of the curriculum: so many steps on chains of n trajectories of some length."""

    trajectories: int
    length: int
    steps: int


@dataclass(frozen=True)
class Setting:
    """What all agents have in common.

    Attributes:
        run: folder of their runs.
        trained: most tokens of a chain in training.
        batch_tokens: tokens in a batch.
        ring_size: R.
    """

    run: Path
    trained: int
    batch_tokens: int
    ring_size: int

    @property
    def curriculum(self) -> list[Stage]:
        """From 64 tokens, where attention finds the key first, by doubling to `trained`."""
        counts = [2**k for k in range(2, 10) if 2**k * LENGTH <= self.trained]
        first = [Stage(2, 32, 100), Stage(2, LENGTH // 2, 50), Stage(2, LENGTH, 50)]
        return first + [Stage(count, LENGTH, 100) for count in counts]


def main(options: Sequence[str]) -> None:
    """Trains what is not trained, asks what was not asked, and draws both."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench recall",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m scripts.bench recall --seeds 0 --lengths 1000 8000",
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=LENGTHS)
    parser.add_argument("--chains", type=int, default=4, help="of each length")
    parser.add_argument("--trained", type=int, default=8_000, help="most tokens in training")
    parser.add_argument("--batch-tokens", type=int, default=8_000)
    parser.add_argument("--ring-size", type=int, default=8)
    parser.add_argument("--run", type=Path, default=Path("runs/recall"), help="of the agents")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("docs/long_context"),
        help="of the CSV, whose answers count",
    )
    arguments = parser.parse_args(options)
    ring.simulate_devices(arguments.ring_size)
    setting = Setting(arguments.run, arguments.trained, arguments.batch_tokens, arguments.ring_size)
    file = arguments.out / "recall.csv"
    found = recall_report.read(file)
    for tokens, seed, chain, mode in itertools.product(
        arguments.lengths, arguments.seeds, range(arguments.chains), arguments.modes
    ):
        known = any(each[:4] == (seed, mode, tokens, chain) for each in found)
        if not known and (mode != "bpt" or seed == arguments.seeds[0]):
            found += ask(setting, mode, seed, tokens, chain)
            recall_report.write(file, found)
    recall_report.show(found, arguments.trained, arguments.out)


def ask(setting: Setting, mode: str, seed: int, tokens: int, chain: int) -> list[Answers]:
    """Answers of one agent to the questions of one chain."""
    start = time.perf_counter()
    given = predicted(setting, mode, seed, tokens, chain)
    apart = 0.0
    if mode == "bpt":
        around = predicted(setting, "ring", seed, tokens, chain)
        apart = float(np.abs(given.actions - around.actions).max())
    right = ((given.actions > 0) == (given.wanted > 0)).all(axis=-1)
    print(
        f"{NAMES[mode]}, seed {seed}, {tokens:,} tokens, chain {chain}: "
        f"{right.mean():.1%} of {len(right)} in {time.perf_counter() - start:.1f} s",
        flush=True,
    )
    parts = (given.distances - 1) * PARTS // tokens
    return [
        Answers(
            *(seed, mode, tokens, chain, int(part)),
            asked=int((parts == part).sum()),
            right=int(right[parts == part].sum()),
            difference=apart,
        )
        for part in np.unique(parts)
    ]


def config_of(setting: Setting, mode: str, seed: int) -> TrainConfig:
    """The run of an agent, for training it and for asking it in some mode."""
    stages = setting.curriculum
    model = dataclasses.replace(
        PRESETS["at_step"].model,
        cross_episode=mode != "own",
        memory="bpt" if mode == "bpt" else "ring",
    )
    return TrainConfig(
        run=setting.run / f"{'own' if mode == 'own' else 'whole'}-seed{seed}",
        data=DataConfig(
            store=Path("none"),
            tasks=(TASK,),
            trajectories=max(stage.trajectories for stage in stages),
            index_range=LONGEST,
            batch_tokens=setting.batch_tokens,
        ),
        model=model,
        optimizer=OptimizerConfig(
            steps=sum(stage.steps for stage in stages), learning_rate=2e-3, warmup=50
        ),
        mesh=MeshConfig(ring=1 if mode == "bpt" else setting.ring_size),
        seed=seed,
    )


def sampler_of(config: TrainConfig, stage: Stage, batch_tokens: int) -> RecallSampler:
    """Chains of one stage of the curriculum, about so many tokens of them in a batch."""
    sizes = networks.dimensions(config)
    return RecallSampler(
        observation=sizes.observation,
        action=sizes.action,
        trajectories=stage.trajectories,
        length=stage.length,
        chains=max(1, batch_tokens // (stage.trajectories * stage.length)),
        index_range=LONGEST,
        cross_episode=config.model.cross_episode,
    )


class Asked(NamedTuple):
    """A trained agent where it is asked: its actions for a batch, its parameters, the mesh."""

    actions: Any
    parameters: Any
    mesh: Mesh


@cache
def agent_of(setting: Setting, mode: str, seed: int) -> Asked:
    """The agent of a mode, trained if it was not.

    Raises:
        ValueError: its run is of another curriculum, or of other batches.
    """
    config = config_of(setting, mode, seed)
    trained = config_of(setting, "own" if mode == "own" else "ring", seed)
    if checkpoint.latest(config.run) is None:
        train(setting, trained)
    kept = checkpoint.read_config(config.run)
    if dataclasses.replace(kept, mesh=trained.mesh) != trained:
        raise ValueError(f"{config.run} holds an agent trained otherwise; give another --run")
    mesh = sharding.make_mesh(config.mesh)
    checkpoints = checkpoint.Checkpoints(config.run)
    with jax.set_mesh(mesh):
        state = checkpoints.restore(config, mesh)
    checkpoints.close()
    assert state is not None  # the run has a checkpoint
    structure, _ = networks.abstract_parameters(config, mesh)

    def actions(parameters: Any, batch: Batch) -> jax.Array:
        network: Any = networks.assemble(structure, parameters)
        return network(batch)

    compiled = jax.jit(actions, compiler_options=sharding.compiler_options(mesh))
    return Asked(compiled, state.parameters, mesh)


def train(setting: Setting, config: TrainConfig) -> None:
    """Runs the curriculum and saves its end."""
    mesh = sharding.make_mesh(config.mesh)
    checkpoints = checkpoint.Checkpoints(config.run)
    with jax.set_mesh(mesh):
        state, done = checkpoint.initial_state(config, mesh), 0
        step = training.make_step(config, mesh)
        for stage in setting.curriculum:
            start, losses = time.perf_counter(), []
            sampler = sampler_of(config, stage, setting.batch_tokens)
            last = done + stage.steps
            for drawn in training.batches(sampler, mesh, config.seed, done, last):
                state, values = step(state, drawn.batch)
                losses.append(float(values["loss"]))
            done = last
            print(
                f"{config.run.name}: {stage.trajectories} × {stage.length} tokens, to step {done}: "
                f"loss {np.mean(losses[-20:]):.4f} in {time.perf_counter() - start:.0f} s",
                flush=True,
            )
        checkpoint.write_config(config)
        checkpoints.save(state, done, config, {})
    checkpoints.close()


class Given(NamedTuple):
    """What an agent answers to the 250 questions of a chain.

    Attributes:
        actions: ``[250, A]``, its own.
        wanted: ``[250, A]``, the bits of the values.
        distances: int ``[250]``, tokens from where each value was shown.
    """

    actions: np.ndarray
    wanted: np.ndarray
    distances: np.ndarray


@lru_cache(maxsize=4)
def predicted(setting: Setting, mode: str, seed: int, tokens: int, chain: int) -> Given:
    """The answers of one agent, in the order of the questions."""
    agent = agent_of(setting, mode, seed)
    chains = Stage(tokens // LENGTH, LENGTH, 0)
    sampler = sampler_of(config_of(setting, mode, seed), chains, tokens)
    with jax.set_mesh(agent.mesh):
        batch = placed(sampler, agent.mesh, seed, ASKING + chain)
        actions = agent.actions(agent.parameters, batch)
    asking = np.asarray(batch.loss_mask[0]) > 0
    order = np.argsort(np.asarray(batch.order[0])[asking])
    return Given(
        np.asarray(actions[0])[asking][order],
        np.asarray(batch.action[0])[asking][order],
        sampler.distances(seed, ASKING + chain, 0),
    )
