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
import csv
import dataclasses
import io
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import ring
from agent.config import DataConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig
from agent.presets import PRESETS
from agent.report import figure
from agent.tables import table
from data.batches import Batch
from data.recall import RecallSampler
from data.sampling import placed
from exorl.paths import write_whole

MODES = ("ring", "bpt", "own")
NAMES = {"ring": "ring", "bpt": "bpt, one device", "own": "own trajectory only"}
TASK = "jaco_reach_top_left"
"""Observations of 42 numbers hold a key of 32 bits, a value of 9 and a mark."""
LENGTH = 250  # steps of a trajectory
LONGEST = 512  # trajectories in a chain; shorter ones are told indices with gaps
LENGTHS = tuple(LENGTH * 2**k for k in range(2, 10))
PARTS = 10
"""Of the distances in a chain, nearest first, answers are counted apart."""
ASKING = 10**6
"""Training steps are numbered from 0, chains that are asked from here."""


class Answers(NamedTuple):
    """How often values of one tenth of the distances were given back exactly, in one chain.

    Attributes:
        seed: of training and of the chains.
        mode: one of `MODES`.
        tokens: of the chain.
        chain: its number.
        part: tenth of the distances, 0 is the nearest.
        asked: questions.
        right: answers with every bit right.
        difference: largest difference of the chain's actions from the ring's.
    """

    seed: int
    mode: str
    tokens: int
    chain: int
    part: int
    asked: int
    right: int
    difference: float


class Stage(NamedTuple):
    """Part of the curriculum: so many steps on chains of n trajectories of some length."""

    trajectories: int
    length: int
    steps: int


def curriculum(trained: int) -> list[Stage]:
    """From 64 tokens, where attention finds the key first, by doubling to `trained` tokens."""
    counts = [2**k for k in range(2, LONGEST.bit_length()) if 2**k * LENGTH <= trained]
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
    parser.add_argument("--out", type=Path, default=Path("docs/long_context"), help="of the CSV")
    arguments = parser.parse_args(options)
    ring.simulate_devices(arguments.ring_size)
    file = arguments.out / "recall.csv"
    found = read(file)
    for tokens in arguments.lengths:
        for seed in arguments.seeds:
            for mode in arguments.modes:
                if mode != "bpt" or seed == arguments.seeds[0]:
                    ask(arguments, mode, seed, tokens, found, file)
    report(found, arguments.out)


def ask(
    arguments: argparse.Namespace,
    mode: str,
    seed: int,
    tokens: int,
    found: list[Answers],
    file: Path,
) -> None:
    """Answers of one agent to chains of one length, beside those that were found before."""
    for chain in range(arguments.chains):
        if any(a[:4] == (seed, mode, tokens, chain) for a in found):
            continue
        start = time.perf_counter()
        config = config_of(arguments, seed, mode)
        sampler = sampler_of(config, Stage(tokens // LENGTH, LENGTH, 0), tokens)
        actions, wanted = predicted(arguments, mode, seed, sampler, chain)
        difference = 0.0
        if mode == "bpt":
            around, _ = predicted(arguments, "ring", seed, sampler, chain)
            difference = float(np.abs(actions - around).max())
        right = ((actions > 0) == (wanted > 0)).all(axis=-1)
        distances = sampler.distances(seed, ASKING + chain, 0)
        part = (distances - 1) * PARTS // tokens
        found += [
            Answers(
                *(seed, mode, tokens, chain, int(each)),
                asked=int((part == each).sum()),
                right=int(right[part == each].sum()),
                difference=difference,
            )
            for each in np.unique(part)
        ]
        write(file, found)
        print(
            f"{NAMES[mode]}, seed {seed}, {tokens:,} tokens, chain {chain}: "
            f"{right.mean():.1%} of {len(right)} in {time.perf_counter() - start:.1f} s",
            flush=True,
        )


def config_of(arguments: argparse.Namespace, seed: int, mode: str) -> TrainConfig:
    """The run of an agent, for training it and for asking it in some mode."""
    stages = curriculum(arguments.trained)
    kind = "own" if mode == "own" else "whole"
    model: ModelConfig = dataclasses.replace(
        PRESETS["at_step"].model,
        cross_episode=mode != "own",
        memory="bpt" if mode == "bpt" else "ring",
    )
    most = max(stage.trajectories for stage in stages)
    return TrainConfig(
        run=arguments.run / f"{kind}-seed{seed}",
        data=DataConfig(
            store=Path("none"),
            tasks=(TASK,),
            trajectories=most,
            index_range=LONGEST,
            batch_tokens=arguments.batch_tokens,
        ),
        model=model,
        optimizer=OptimizerConfig(
            steps=sum(stage.steps for stage in stages), learning_rate=2e-3, warmup=50
        ),
        mesh=MeshConfig(ring=1 if mode == "bpt" else arguments.ring_size),
        seed=seed,
    )


def sampler_of(config: TrainConfig, stage: Stage, batch_tokens: int) -> RecallSampler:
    """Chains of one stage of the curriculum, about so many tokens of them in a batch."""
    from agent import networks

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


def parameters_of(arguments: argparse.Namespace, mode: str, seed: int) -> tuple[Any, Any, Mesh]:
    """Structure and parameters of a trained agent on the mesh where it is asked, and the mesh."""
    from agent import checkpoint, networks
    from agent.sharding import make_mesh

    trained = config_of(arguments, seed, "own" if mode == "own" else "ring")
    if checkpoint.latest(trained.run) is None:
        train(arguments, trained)
    config = config_of(arguments, seed, mode)
    mesh = make_mesh(config.mesh)
    checkpoints = checkpoint.Checkpoints(config.run)
    with jax.set_mesh(mesh):
        state = checkpoints.restore(config, mesh)
    checkpoints.close()
    if state is None or int(state.step) != config.optimizer.steps:
        raise ValueError(f"{config.run} holds another curriculum's agent; give another --run")
    return networks.abstract_parameters(config, mesh)[0], state.parameters, mesh


def train(arguments: argparse.Namespace, config: TrainConfig) -> None:
    """Runs the curriculum and saves its end."""
    from agent import checkpoint, training
    from agent.sharding import make_mesh

    mesh = make_mesh(config.mesh)
    checkpoints = checkpoint.Checkpoints(config.run)
    with jax.set_mesh(mesh):
        state, done = checkpoint.initial_state(config, mesh), 0
        step = training.make_step(config, mesh)
        for stage in curriculum(arguments.trained):
            start, losses = time.perf_counter(), []
            sampler = sampler_of(config, stage, config.data.batch_tokens)
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


def predicted(
    arguments: argparse.Namespace, mode: str, seed: int, sampler: RecallSampler, chain: int
) -> tuple[np.ndarray, np.ndarray]:
    """An agent's actions for a chain's questions, and the actions wanted, both ``[250, A]``."""
    structure, parameters, mesh = _kept(parameters_of, arguments, mode, seed)
    with jax.set_mesh(mesh):
        batch = placed(sampler, mesh, seed, ASKING + chain)
        actions = _forward(structure, mesh)(parameters, batch)
    asking = np.asarray(batch.loss_mask[0]) > 0
    order = np.argsort(np.asarray(batch.order[0])[asking])
    return np.asarray(actions[0])[asking][order], np.asarray(batch.action[0])[asking][order]


_agents: dict[tuple[str, int], Any] = {}


def _kept(make: Callable[..., Any], arguments: argparse.Namespace, mode: str, seed: int) -> Any:
    if (mode, seed) not in _agents:
        _agents[mode, seed] = make(arguments, mode, seed)
    return _agents[mode, seed]


@cache
def _forward(structure: Any, mesh: Mesh) -> Any:
    from agent import networks, sharding

    def actions(parameters: Any, batch: Batch) -> jax.Array:
        network: Any = networks.assemble(structure, parameters)
        return network(batch)

    return jax.jit(actions, compiler_options=sharding.compiler_options(mesh))


def read(file: Path) -> list[Answers]:
    """Inverse of `write`; nothing if there is no file."""
    if not file.exists():
        return []
    kinds = Answers.__annotations__
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [Answers(**{name: kinds[name](row[name]) for name in Answers._fields}) for row in rows]


def write(file: Path, found: Sequence[Answers]) -> None:
    """One row for each tenth of a chain's distances; the file is replaced whole."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Answers._fields)
    writer.writerows(sorted(found))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text.getvalue().encode())


def accuracy(answers: Sequence[Answers]) -> float:
    """Part of the questions that were answered exactly."""
    return sum(each.right for each in answers) / sum(each.asked for each in answers)


def report(found: Sequence[Answers], out: Path) -> None:
    """Prints the table by length; draws accuracy against length and against distance."""
    grouped: dict[tuple[str, int, int], list[Answers]] = defaultdict(list)
    for each in found:
        grouped[each.mode, each.tokens, each.seed].append(each)
    modes = [mode for mode in MODES if any(key[0] == mode for key in grouped)]
    lengths = sorted({key[1] for key in grouped})
    rows = []
    for tokens in lengths:
        cells = [f"{tokens:,}", str(tokens // LENGTH)]
        for mode in modes:
            seeds = sorted(key[2] for key in grouped if key[:2] == (mode, tokens))
            cells.append(" ".join(f"{accuracy(grouped[mode, tokens, s]):.2%}" for s in seeds))
        asked = {sum(e.asked for e in grouped[k]) for k in grouped if k[1] == tokens}
        apart = [e.difference for e in found if e.tokens == tokens and e.mode == "bpt"]
        cells += ["/".join(map(str, sorted(asked))), f"{max(apart):.1e}" if apart else ""]
        rows.append(cells)
    header = ["tokens", "n", *(NAMES[mode] for mode in modes)]
    print("\nExact answers, one number a training seed\n")
    print(table([*header, "questions", "largest |bpt − ring|"], rows))
    figure(out / "recall.png", lambda axes: _draw_lengths(axes, grouped, modes))
    figure(out / "recall_distance.png", lambda axes: _draw_distances(axes, found))


def _draw_lengths(axes: Any, grouped: dict[Any, list[Answers]], modes: Sequence[str]) -> None:
    styles = {"ring": "o-", "bpt": "x", "own": "s-"}
    for color, mode in enumerate(modes):
        lengths = sorted({key[1] for key in grouped if key[0] == mode})
        each = [[accuracy(g) for k, g in grouped.items() if k[:2] == (mode, t)] for t in lengths]
        line = [float(np.mean(values)) for values in each]
        seeds = max(map(len, each))
        label = f"{NAMES[mode]} ({seeds} training seed{'s' if seeds > 1 else ''})"
        axes.plot(lengths, line, styles[mode], color=f"C{color}", label=label, markersize=7)
        if mode != "bpt":
            for tokens, values in zip(lengths, each, strict=True):
                axes.plot([tokens] * len(values), values, ".", color=f"C{color}")
    axes.axhline(2.0**-9, color="grey", linestyle=":", label="chance")
    axes.axvline(8_000, color="grey", linestyle="--", linewidth=1, label="longest in training")
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [f"{tokens // 1000}K" for tokens in LENGTHS])
    axes.set_xlabel("tokens in the sequence (one pair a token)")
    axes.set_ylabel("values given back exactly")
    axes.set_ylim(-0.03, 1.03)
    axes.legend(fontsize=8)


def _draw_distances(axes: Any, found: Sequence[Answers]) -> None:
    for tokens in sorted({each.tokens for each in found if each.mode == "ring"}):
        chosen = [each for each in found if each.mode == "ring" and each.tokens == tokens]
        parts = sorted({each.part for each in chosen})
        places = [(part + 0.5) / PARTS * tokens for part in parts]
        values = [accuracy([e for e in chosen if e.part == part]) for part in parts]
        axes.plot(places, values, ".-", label=f"{tokens:,} tokens")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("distance from the question to its answer, tokens")
    axes.set_ylabel("values given back exactly (ring)")
    axes.legend(fontsize=8)
