"""Try learning rates and widths of one method at its preset's budget, and print what each earns.

Example:
    python -m scripts.tune --preset demo_dt --store ~/.cache/exoring/demo/stores/single \
        --task cheetah_run --learning-rates 1e-3 4e-3 --widths 32 64

Every run has the preset's number of updates and tokens an update. Rollouts begin in other states
than those of scripts.evaluate, so that what is chosen here has not been chosen for its luck there.
The same command again goes on where it was: nothing finished is trained or rolled out twice.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from agent.presets import PRESETS
from scripts import command
from scripts.jobs import Job, module, run

EVALUATION_SEED = 1


@dataclass(frozen=True)
class Tune:
    """A grid.

    Attributes:
        preset: what is varied, see scripts.train.
        store: folder of a packed episode store.
        task: whose rewards are learned and earned.
        learning_rates: peaks to try.
        widths: widths to try.
        out: folder of the runs, and of the table, <preset>.md.
        seeds: training seeds 0, 1, … of every point.
        rollouts: chains of each run.
        jobs: processes at a time.
    """

    preset: str
    store: Path
    task: str
    learning_rates: tuple[float, ...]
    widths: tuple[int, ...]
    out: Path = Path("runs/tune")
    seeds: int = 1
    rollouts: int = 10
    jobs: int = len(os.sched_getaffinity(0))


def main(args: Tune) -> None:
    """Train and evaluate every point, print and save the table."""
    if args.preset not in PRESETS:
        raise ValueError(f"there is no preset {args.preset!r}, only {', '.join(PRESETS)}")
    jobs = [
        Job(
            folder.name,
            (
                module(
                    *("train", args.preset, "--run", folder, "--seed", seed),
                    *("--data.store", args.store, "--data.tasks", args.task),
                    *("--optimizer.learning-rate", rate, "--model.width", width),
                ),
                module(
                    *("evaluate", "--checkpoint", folder, "--context", "self"),
                    *("--no-plots", "--chains", args.rollouts, "--seed", EVALUATION_SEED),
                ),
            ),
        )
        # Each resumes what is there, or refuses it by name if it is of another task or store.
        for rate, width, seed, folder in points(args)
    ]
    run(jobs, args.jobs, args.out / "logs", args.out / "compiled")
    text = table(args)
    (args.out / f"{args.preset}.md").write_text(text + "\n")
    print(text)


def points(args: Tune) -> Iterator[tuple[float, int, int, Path]]:
    """Learning rate, width, seed and run of every point, the widest first: they take longest."""
    for width in sorted(args.widths, reverse=True):
        for rate in args.learning_rates:
            for seed in range(args.seeds):
                name = f"{args.preset}-lr{rate:g}-width{width}-seed{seed}"
                yield rate, width, seed, args.out / name


def table(args: Tune) -> str:
    """Mean return of every point with its interval, and what training took.

    Raises:
        ValueError: a run was stopped before its last update.
    """
    from agent import tables
    from agent.results import read_csv
    from agent.statistics import stratified

    rows, preset = [], PRESETS[args.preset]
    for rate in sorted(args.learning_rates):
        for width in sorted(args.widths):
            runs = [at for r, w, _, at in points(args) if (r, w) == (rate, width)]
            found = [read_csv(at / "evaluation" / "results.csv") for at in runs]
            by_seed = [tables.summary(results, "mean") for results in found]
            rows.append(
                [
                    f"{rate:g}",
                    str(width),
                    tables.shown(stratified([by_seed], np.mean)),
                    ", ".join(f"{chains.mean():.0f}" for chains in by_seed),
                    f"{np.mean([_seconds(run, preset.optimizer.steps) for run in runs]):.0f}",
                ]
            )
    header = ["learning rate", "width", "mean return [95 % over chains]", "by seed", "seconds"]
    return (
        f"{args.preset}: {preset.optimizer.steps:,} updates, {args.rollouts} chains a seed, "
        f"evaluation seed {EVALUATION_SEED}\n\n{tables.table(header, rows)}"
    )


def _seconds(run: Path, updates: int) -> float:
    """Of training a run to its last update, by the speed of its log lines."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = lines[-1]["step"]
    if last != updates:
        raise ValueError(
            f"{run} was stopped after update {last} of {updates}; run the same command again"
        )
    speeds = [line["steps_per_second"] for line in lines if "steps_per_second" in line]
    return last / (sum(speeds) / len(speeds))


if __name__ == "__main__":
    command.run(lambda: main(tyro.cli(Tune, description=__doc__)))
