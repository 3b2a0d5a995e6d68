"""Roll a trained agent out in dm_control: tables, plots, and every episode's return.

Examples:
    python -m scripts.evaluate --checkpoint runs/demo/seed0/hidden
    python -m scripts.evaluate --checkpoint RUN --context self --n 128
    python -m scripts.evaluate --checkpoint RUN --context dataset_sorted --n 128 --envs 32
    python -m scripts.evaluate --checkpoint RUN --context self dataset_sorted --n 1 2 4 --against BC

Finished chains are not rolled out again: an interrupted evaluation goes on where it was.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import tyro

from agent.config import Memory
from agent.protocol import Context, Goal, Protocol, Source
from scripts import command

if TYPE_CHECKING:
    from agent.checkpoint import Agent
    from agent.evaluation import Evaluation, Seen
    from agent.results import Cell, Result
    from data import Pool


@dataclass(frozen=True)
class Evaluate:
    """Roll a trained agent out in dm_control.

    Attributes:
        checkpoint: folder of a training run.
        step: of the checkpoint: the newest, the best of those made by evaluations, or a number.
        context: what precedes an own episode, one or several. By default all that tell something
            about the agent.
        n: most trajectories in the sequence, the one acted in included, one or several; by default
            as many as were trained. For baselines, the episodes they get.
        episodes: own episodes a chain, by default as many as there is room for.
        chains: for each task and protocol; by default 20, or 1 where environments share a context.
        envs: environments under each chain's context; its prefix is computed and kept once.
        together: chains at a time, by default all.
        seed: of initial states and drawn contexts.
        target: return asked for: `attainable` the 99 % quantile of the training returns or the best
            of the context if that is higher, `dataset` the best of the data, `context` the best of
            the context, `task` the most the task can give, or a raw return.
        multiplier: of the target, one or several.
        share_prefix: keep the prefix of multiplier 1 for all of them.
        allow_low_target: ask for less than the best of the context.
        stale: when an own episode beats the target, keep the returns-to-go before it, or ask for
            the new best and compute the context anew.
        beyond: when there is no room for another trajectory, evict the oldest from the cache, or
            compute the context anew without it.
        extrapolate: let n exceed what was trained.
        source: the part of the data that contexts are drawn from.
        cache: dtype of cached keys and values, by default the network's own.
        memory: act on one device with this memory mode instead of the run's own mesh.
        ring: act around a ring of this many devices instead, simulated where there is no other.
        against: evaluated runs of baselines: how often a chain beats theirs, performance profiles,
            and their best of n in the plot against n.
        video: save the first, the best and the last episode of the first chain as GIFs, when that
            is rolled out; if it was finished earlier, that is said.
        plots: draw plots (needs matplotlib).
        out: folder of the results; by default `evaluation` in the run.
    """

    checkpoint: Path
    step: int | Literal["newest", "best"] = "newest"
    context: tuple[Context, ...] = ()
    n: tuple[int, ...] = ()
    episodes: int | None = None
    chains: int | None = None
    envs: int = 1
    together: int | None = None
    seed: int = 0
    target: Goal | float = "attainable"
    multiplier: tuple[float, ...] = (1.0,)
    share_prefix: bool = False
    allow_low_target: bool = False
    stale: Literal["keep", "reprefill"] = "keep"
    beyond: Literal["evict", "reprefill"] = "evict"
    extrapolate: bool = False
    source: Source = "held_out"
    cache: Literal["float32", "bfloat16"] | None = None
    memory: Memory | None = None
    ring: int | None = None
    against: tuple[Path, ...] = ()
    video: bool = False
    plots: bool = True
    out: Path | None = None

    def protocols(self, contexts: Sequence[Context], trained: int) -> list[Protocol]:
        """Every context with every n and multiplier."""
        return [
            Protocol(
                context=context,
                n=n,
                episodes=self.episodes,
                target=self.target,
                multiplier=multiplier,
                stale=self.stale,
                beyond=self.beyond,
                envs=self.envs,
                share_prefix=self.share_prefix,
                allow_low_target=self.allow_low_target,
                extrapolate=self.extrapolate,
                source=self.source,
                cache=self.cache,
            )
            for context in contexts
            for n in ((1,) if context == "empty" else self.n or (trained,))
            for multiplier in self.multiplier
        ]


def main(args: Evaluate) -> None:
    """Evaluate, print the tables, and save every episode's return."""
    from agent import evaluation, processes, report, results, tables

    for name in ("context", "n", "multiplier", "against"):
        values = getattr(args, name)
        if len(set(values)) != len(values):
            given = " ".join(map(str, values))
            raise ValueError(f"--{name} {given} asks for one thing twice; give each once")
    if args.plots:
        report.matplotlib_figure()
    processes.join()
    baselines = _baselines(args)
    agent, pool, identity = _load(args)
    out = args.out or args.checkpoint / "evaluation"
    chains = args.chains or (1 if args.envs > 1 else 20)
    contexts = args.context or evaluation.contexts_of(agent)
    protocols = args.protocols(contexts, agent.config.data.trajectories)
    rollouts = evaluation.Evaluation(
        agent, pool, identity, chains=chains, seed=args.seed, together=args.together
    )
    cells, unseen = _run(args, rollouts, protocols, out)
    if not processes.is_first():
        return
    rows = results.flat(cells)
    results.write_csv(out / "results.csv", rows)
    print(f"{agent.config.method}, step {agent.step}, training seed {agent.config.seed}; ", end="")
    print(f"{chains} chains, evaluation seed {args.seed}; {results.versions()}\n")
    print(tables.evaluation_table(rows))
    if len(pool.tasks) > 1:
        print(f"\nOver all tasks:\n\n{tables.aggregate_table(rows)}")
    if baselines:
        print(f"\nChains beside those of baselines:\n\n{tables.improvement_table(rows, baselines)}")
    if args.plots:
        _plot(args, pool, rows, baselines, out)
    if args.video:
        _draw(sorted((out / "videos").glob("*.npz")))
    if unseen:
        print(
            f"\nno video of {', '.join(unseen)}: the first chain was finished without --video; "
            f"--chains 1 and another --out roll it out once more"
        )
    found = ["every episode's return"] + ["plots"] * args.plots + ["videos"] * args.video
    print(f"\n{', '.join(found)}: {out}")


def _load(args: Evaluate) -> "tuple[Agent, Pool, str]":
    import jax

    from agent import checkpoint
    from agent.config import MeshConfig
    from agent.sharding import make_mesh
    from data import Pool
    from exorl import EpisodeStore

    config = checkpoint.read_config(args.checkpoint)
    if args.memory and args.ring:
        raise ValueError("--memory is for one device and --ring for several; give one of them")
    if args.memory or args.ring:
        # Simulating devices is for CPUs, and leaves a mesh of accelerators as it is; each of
        # several processes has devices of its own.
        simulated = bool(args.ring) and not jax.distributed.is_initialized()
        mesh = MeshConfig(ring=args.ring or 1, simulated=simulated)
        model = dataclasses.replace(config.model, memory=args.memory or "ring")
        config = dataclasses.replace(config, model=model, mesh=mesh)
    step = checkpoint.numbered(args.checkpoint, args.step)
    agent = checkpoint.load(args.checkpoint, config, make_mesh(config.mesh), step)
    store = EpisodeStore(config.data.store)
    checkpoint.check_episodes(args.checkpoint, step, store)
    pool = Pool.load(store, config.data.tasks, config.data.holdout)
    return agent, pool, checkpoint.identity(args.checkpoint, step)


def _run(
    args: Evaluate, rollouts: "Evaluation", protocols: Sequence[Protocol], out: Path
) -> "tuple[list[Cell], list[str]]":
    """The cells of all protocols, finished earlier or now, and of what --video has no episodes."""
    from tqdm import tqdm

    from agent import processes, results

    kept, first = out / "cells.jsonl", processes.is_first()
    found = {cell.key: cell for cell in results.read(kept)}
    planned = rollouts.plan(protocols, list(found.values()))
    coming = {_stem(group.task, group.protocol) for group in planned if 0 in group.chains}
    unseen = [
        stem
        for stem in (_stem(task, each) for task in rollouts.pool.tasks for each in protocols)
        if args.video and stem not in coming and not (out / "videos" / f"{stem}-first.npz").exists()
    ]

    def watch(seen: "Seen") -> None:
        if args.video and first and 0 in seen.group.chains:
            _keep(seen, out / "videos")

    with tqdm(
        total=sum(group.steps for group in planned),
        unit="step",
        disable=not (first and sys.stderr.isatty()),
    ) as bar:
        for cells in rollouts.run(planned, progress=bar.update, watch=watch):
            found |= {cell.key: cell for cell in cells}
            if first:
                results.append(kept, cells)
    return [found[key] for key in rollouts.keys(protocols)], unseen


def _stem(task: str, protocol: Protocol) -> str:
    """What files of a task under a protocol are called."""
    return f"{task}-{protocol.context}-n{protocol.n}-x{protocol.multiplier:g}"


def _keep(seen: "Seen", folder: Path) -> None:
    """Keep the first, the best and the last episode of the first chain, to be drawn later."""
    group, returns = seen.group, seen.rolled.returns[0]
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {"first": 0}
    if len(returns) > 1:
        chosen |= {"best": int(returns.argmax()), "last": len(returns) - 1}
    for name, episode in chosen.items():
        np.savez(
            folder / f"{_stem(group.task, group.protocol)}-{name}.npz",
            task=group.task,
            seed=seen.seeds[0, episode],
            actions=seen.rolled.trajectories[episode][0].action,
        )


def _draw(episodes: Sequence[Path]) -> None:
    """Draw kept episodes in a process of its own: here MuJoCo was loaded without a renderer."""
    environment = dict(os.environ)
    if environment.get("MUJOCO_GL") == "disabled":
        del environment["MUJOCO_GL"]
    command = [sys.executable, "-m", "scripts.render", *map(str, episodes)]
    subprocess.run(command, env=environment, check=False)


def _baselines(args: Evaluate) -> "list[Result]":
    """Episodes of the runs to compare with, each evaluated in one way.

    Raises:
        ValueError: an evaluation that chains of ours cannot be compared with.
    """
    from agent import checkpoint, results, tables

    if not args.against:
        return []
    tasks = checkpoint.read_config(args.checkpoint).data.tasks
    found: list[Result] = []
    for run in args.against:
        file = run / "evaluation" / "results.csv"
        rows = results.read_csv(file)
        ways = sorted({at[1:] for at in tables.protocols_of(rows)})
        if len(ways) != 1:
            raise ValueError(
                f"{file} holds {len(ways)} contexts, n and multipliers ({ways}), and chains can be "
                f"compared with one only; evaluate {run} with one of them, or give a baseline's run"
            )
        missing = [task for task in tasks if not results.select(rows, task=task)]
        if missing:
            raise ValueError(
                f"{file} holds nothing of {', '.join(missing)}, which {args.checkpoint} is "
                f"evaluated on; give a baseline of the same tasks"
            )
        method, seed = rows[0].method, rows[0].seed
        if results.select(found, method=method, seed=seed):
            raise ValueError(
                f"{run} is of method {method} and training seed {seed}, and so is a run before it "
                f"in --against; give one of them, or runs of several seeds"
            )
        found += [row for row in rows if row.task in tasks]
    return found


def _plot(
    args: Evaluate, pool: "Pool", rows: "list[Result]", baselines: "list[Result]", out: Path
) -> None:
    from agent import report, results
    from exorl import task

    references = {
        name: report.Reference(task(name).random_return, pool.returns[name][pool.training])
        for name in pool.tasks
    }
    usual = results.select(rows, multiplier=args.multiplier[0])
    report.plot_episodes(out / "returns.png", usual, references)
    if len(args.n) > 1:
        report.plot_lengths(out / "lengths.png", usual, baselines, references)
    if baselines:
        report.plot_profiles(out / "profiles.png", usual, baselines)
    if len(args.multiplier) > 1:
        report.plot_targets(out / "targets.png", rows, references)


if __name__ == "__main__":
    command.run(lambda: main(tyro.cli(Evaluate, description=__doc__)))
