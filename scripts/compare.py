"""The whole comparison: collect, pack, train every method, roll out, report. What `make demo` runs.

Example:
    python -m scripts.compare demo --seeds 3

Collects cheetah episodes in dm_control, trains BC-10 %, DT and an Agentic Transformer with ring
attention on one task, and another Agentic Transformer that is not told which of two conflicting
tasks it is to do. Everything is resumable: run the same command again.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from exorl import HIDDEN_GROUPS, EpisodeStore, home, relabel, task
from scripts import command
from scripts.jobs import Job, module, run

TASK = "cheetah_run"
HIDDEN = HIDDEN_GROUPS["cheetah_run_or_run_backward"]


@dataclass(frozen=True)
class Compare:
    """Sizes of a comparison.

    Attributes:
        run: folder of the comparison: report.md, results.csv, plots, one folder a trained agent.
        data: folder of the collected episodes and packed stores.
        seeds: training seeds 0, 1, …; the data are the same for all.
        supervised_steps: environment steps of each collector that learns a task.
        structured_steps: environment steps of structured random policies.
        updates: training steps of every agent, instead of its preset's.
        rollouts: chains for each agent, task and context.
        jobs: processes at a time.
        plots: draw plots (needs matplotlib).
    """

    run: Path
    data: Path
    seeds: int = 1
    supervised_steps: int = 60_000
    structured_steps: int = 200_000
    updates: int | None = None
    rollouts: int = 20
    jobs: int = len(os.sched_getaffinity(0))
    plots: bool = True


SIZES = {
    "demo": (
        "six to nine minutes on 2 cores",
        Compare(run=Path("runs/demo"), data=home() / "demo"),
    ),
    "smoke": (
        "the same way at a size that learns nothing, in about a minute and a half",
        Compare(
            run=Path("runs/smoke"),
            data=home() / "smoke",
            supervised_steps=10_000,
            structured_steps=20_000,
            updates=20,
            rollouts=2,
        ),
    ),
}


def main(args: Compare) -> None:
    """Run all stages, write the report and print its tables."""
    if args.plots:
        from agent import report

        report.matplotlib_figure()  # missing, it is to be missed now
    start = time.perf_counter()
    for stage in (_collect(args), _pack(args), _train_and_evaluate(args)):
        run(stage, args.jobs, args.run / "logs", args.data / "compiled")
    _report(args, time.perf_counter() - start)


def _collect(args: Compare) -> list[Job]:
    def job(name: str, task: str, method: str, steps: int) -> Job:
        return Job(
            f"collect {name}",
            (
                module(
                    *("collect", "--task", task, "--method", method, "--steps", steps),
                    *("--out", args.data / "episodes" / name),
                ),
            ),
        )

    supervised = [job(name, name, "supervised", args.supervised_steps) for name in HIDDEN]
    return [*supervised, job("structured", TASK, "structured", args.structured_steps)]


def _pack(args: Compare) -> list[Job]:
    def job(name: str, sources: Sequence[str]) -> Job:
        folders = [str(args.data / "episodes" / source) for source in sources]
        out = str(args.data / "stores" / name)
        pack = module("pack", "--domain", task(TASK).domain, "--out", out, "--sources", *folders)
        return Job(f"pack {name}", (pack,))

    return [job("single", [TASK, "structured"]), job("hidden", HIDDEN)]


def _train_and_evaluate(args: Compare) -> list[Job]:
    jobs = []
    for seed in range(args.seeds):
        for name, (preset, store, tasks) in AGENTS.items():
            run = args.run / f"seed{seed}" / name
            train = module("train", preset, "--run", run, "--seed", seed)
            train += ("--data.store", str(args.data / "stores" / store), "--data.tasks", *tasks)
            if args.updates:
                train += ("--optimizer.steps", str(args.updates))
            evaluate = module(
                "evaluate", "--checkpoint", run, "--chains", args.rollouts, "--no-plots"
            )
            jobs.append(Job(f"{name}, seed {seed}", (train, evaluate)))
    return jobs


AGENTS = {
    "at": ("demo", "single", (TASK,)),
    "hidden": ("demo_hidden", "hidden", HIDDEN),
    "dt": ("demo_dt", "single", (TASK,)),
    "bc10": ("demo_bc10", "single", (TASK,)),
}
"""Folder of an agent → preset, store, tasks. The longest first: no core then waits at the end."""


def _report(args: Compare, seconds: float) -> None:
    from agent import report, tables
    from agent.results import read_csv, versions, write_csv
    from data import Pool

    results = {
        name: [
            result
            for seed in range(args.seeds)
            for result in read_csv(args.run / f"seed{seed}" / name / "evaluation" / "results.csv")
        ]
        for name in AGENTS
    }
    hidden = results.pop("hidden")
    single = [result for each in results.values() for result in each]
    pool = Pool.load(EpisodeStore(args.data / "stores" / "single"), (TASK,))
    returns = relabel.returns(pool.store, TASK)[pool.training]
    text = REPORT.format(
        task=TASK,
        hidden=" or ".join(HIDDEN),
        comparison=tables.comparison_table(single, TASK, returns, task(TASK).random_return),
        hidden_table=tables.hidden_table(hidden),
        rollouts=args.rollouts,
        seeds=args.seeds,
        versions=versions(),
        seconds=seconds,
        cores=args.jobs,
    )
    (args.run / "report.md").write_text(text)
    write_csv(args.run / "results.csv", single + [h._replace(method="at_hidden") for h in hidden])
    if args.plots:
        report.plot_returns(args.run / "returns.png", single, TASK, returns)
        report.plot_in_context(args.run / "in_context.png", hidden)
        report.plot_hidden(args.run / "hidden.png", hidden)
    print(f"\n{text}\nreport, CSV and plots: {args.run}")


REPORT = """\
# Comparison

{seeds} training seed(s), {rollouts} chains for each agent, task and context; initial states are the
same for all. Intervals are 95 % percentile bootstrap over the chains of each task and seed; from
five seeds on the seeds are resampled first, with fewer the intervals say nothing about other seeds,
so the means of all are shown.
{versions}. {seconds:.0f} s with {cores} processes.

## Table 1: {task}, raw returns

One fully observed task: the state tells all, so the context is not needed. Best-of-n and max take
the largest of the same number of episodes.

{comparison}

## Table 2: hidden task ({hidden}, untold), per cent of each task's best-quantile return

The agent is not told which task is rewarded; only the context can tell it.

{hidden_table}
"""


if __name__ == "__main__":
    command.run(
        lambda: main(tyro.extras.overridable_config_cli(SIZES, description=__doc__)),
    )
