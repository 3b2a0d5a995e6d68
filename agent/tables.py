"""Tables of evaluated runs, readable as plain text and as Markdown."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from agent.results import Result, grid, select, units, values_of, whole
from agent.statistics import SUMMARIES, Estimate, bootstrap, improvement, iqm, stratified

NAMES = {"at": "AT", "dt": "DT", "dt_long": "DT-long", "bc": "BC", "bc10": "BC-10 %"}
CONTEXTS = {
    "none": "no context",
    "dataset_sorted": "own-task context",
    "wrong_task": "wrong-task context",
    "self": "self-generated, last episode",
}
"""Columns of the hidden-task table in reading order; `none` is the first self-generated episode."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, readable as plain text too."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def evaluation_table(results: Sequence[Result]) -> str:
    """What `scripts.evaluate` prints: every task and protocol of one agent."""
    rows = []
    for task, context, n, multiplier in protocols_of(results):
        chosen = select(results, task=task, context=context, n=n, multiplier=multiplier)
        alone = len(values_of(chosen, "episode")) == 1
        for name in ("first",) if alone else SUMMARIES:
            cells = [task, context, str(n), f"{multiplier:g}", "episode" if alone else name]
            for field in ("episode_return", "normalized", "percent"):
                cells.append(shown(bootstrap(summary(chosen, name, field))))
            rows.append([*cells, _size(chosen), _labels(chosen)])
    header = ["task", "context", "n", "× target", "statistic", "return [95 %]", "normalised"]
    return table([*header, "% of attainable", "chains × envs × episodes", "labels"], rows)


def summary(results: Sequence[Result], name: str, field: str = "episode_return") -> np.ndarray:
    """One of `SUMMARIES` of one agent, task and protocol, ``[chains]``.

    Of each environment first, for the largest mean of environments is not the mean of the largest.
    """
    return units(SUMMARIES[name](whole(results, field)))


def _by_seed(results: Sequence[Result], name: str, field: str) -> list[np.ndarray]:
    """The same of every training seed."""
    return [summary(select(results, seed=seed), name, field) for seed in values_of(results, "seed")]


def aggregate_table(results: Sequence[Result]) -> str:
    """Mean and interquartile mean of normalised scores over all tasks, by protocol."""
    rows = []
    for context, n, multiplier in sorted({at[1:] for at in protocols_of(results)}):
        chosen = select(results, context=context, n=n, multiplier=multiplier)
        tasks = [select(chosen, task=task) for task in values_of(chosen, "task")]
        alone = len(values_of(chosen, "episode")) == 1
        for name in ("first",) if alone else ("first", "last", "mean", "max"):
            scores = [_by_seed(task, name, "normalized") for task in tasks]
            rows.append(
                [context, str(n), f"{multiplier:g}", "episode" if alone else name]
                + [shown(stratified(scores, of)) for of in (np.mean, iqm)]
                + [f"{len(scores)} × {len(scores[0])} × {len(scores[0][0])}"]
            )
    header = ["context", "n", "× target", "statistic", "mean normalised [95 %]", "IQM [95 %]"]
    return table([*header, "tasks × seeds × chains"], rows)


def improvement_table(results: Sequence[Result], baselines: Sequence[Result]) -> str:
    """How often a chain of the agent beats one of a baseline with as many episodes."""
    rows = []
    for context, n, multiplier in sorted({at[1:] for at in protocols_of(results)}):
        ours = select(results, context=context, n=n, multiplier=multiplier)
        for method in values_of(baselines, "method"):
            theirs = select(baselines, method=method)
            cells = [context, str(n), f"{multiplier:g}", NAMES[method]]
            counts = [_episodes(part) for part in (ours, theirs)]
            for name in ("mean", "max"):
                pairs = [
                    [
                        _by_seed(select(part, task=task), name, "episode_return")
                        for task in values_of(results, "task")
                    ]
                    for part in (ours, theirs)
                ]
                # The largest of more episodes is larger by itself.
                comparable = name == "mean" or len({*counts[0], *counts[1]}) == 1
                cells.append(f"{improvement(*pairs):.2f}" if comparable else "")
            rows.append([*cells, " and ".join("/".join(map(str, each)) for each in counts)])
    header = ["context", "n", "× target", "against", "P(mean is higher)", "P(max is higher)"]
    return table([*header, "episodes a chain"], rows)


def _episodes(results: Sequence[Result]) -> list[int]:
    """How many episodes a chain of each training seed has, distinct numbers ascending."""
    seeds = values_of(results, "seed")
    return sorted({len(values_of(select(results, seed=seed), "episode")) for seed in seeds})


def protocols_of(results: Sequence[Result]) -> list[tuple[str, str, int, float]]:
    """Distinct (task, context, n, multiplier), sorted."""
    return sorted({(r.task, r.context, r.n, r.multiplier) for r in results})


def _size(results: Sequence[Result]) -> str:
    return " × ".join(str(len(values_of(results, name))) for name in ("chain", "env", "episode"))


def _labels(results: Sequence[Result]) -> str:
    """Each label, and of how many episodes if not of all."""
    one = len(values_of(results, "chain")) == 1 < len(values_of(results, "env"))
    counts = Counter(label for r in results for label in r.labels.split("+") if label)
    shown = [
        label if count == len(results) else f"{label} ({count} of {len(results)})"
        for label, count in sorted(counts.items())
    ]
    return ", ".join(shown + ["one context, interval over environments"] * one)


def shown(estimate: Estimate) -> str:
    """Mean and interval in one cell."""
    return f"{estimate.mean:.1f} [{estimate.low:.1f}, {estimate.high:.1f}]"


def comparison_table(
    results: Sequence[Result], task: str, pool_returns: np.ndarray, random_return: float
) -> str:
    """Table 1: the methods on one fully observed task, raw returns.

    Args:
        results: of all methods and seeds on the task, context `self`.
        task: its name.
        pool_returns: ``[N]`` raw returns of the training episodes.
        random_return: mean raw return of a uniformly random policy.
    """
    rows = [
        ["uniform random", "mean", f"{random_return:.1f}", "100 episodes", ""],
        [
            "training data",
            "mean",
            f"{pool_returns.mean():.1f}",
            f"{len(pool_returns)} episodes",
            "",
        ],
        ["training data", "best", f"{pool_returns.max():.1f}", f"{len(pool_returns)} episodes", ""],
    ]
    wanted = {
        "bc10": {"mean": "mean", "max": "best of {n}"},
        "dt": {"mean": "mean", "max": "best of {n}"},
        "at": {"first": "first", "mean": "mean", "last": "last", "max": "max of {n}"},
    }
    for method, statistics in wanted.items():
        chosen = select(results, method=method, task=task, context="self")
        seeds = values_of(chosen, "seed")
        for statistic, label in statistics.items():
            per_seed = _by_seed(chosen, statistic, "episode_return")
            chains, episodes = len(per_seed[0]), len(values_of(chosen, "episode"))
            rows.append(
                [
                    NAMES[method],
                    label.format(n=episodes),
                    shown(stratified([per_seed], np.mean)),
                    f"{len(seeds)} × {chains} chains × {episodes}",
                    _seeds(per_seed, seeds),
                ]
            )
    header = ["method", "statistic", "return [95 % over chains]", "seeds × n", "mean by seed"]
    return table(header, rows)


def hidden_scores(results: Sequence[Result], seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Per cent of the best-quantile return by context and task, one value a rollout, one seed."""
    scores: dict[str, dict[str, np.ndarray]] = {context: {} for context in CONTEXTS}
    for task in values_of(results, "task"):
        own = select(results, seed=seed, task=task)
        alone = grid(select(own, context="self"), "percent")
        scores["none"][task] = alone[:, 0]
        scores["self"][task] = alone[:, -1]
        for context in ("dataset_sorted", "wrong_task"):
            scores[context][task] = grid(select(own, context=context), "percent")[:, 0]
    return scores


def hidden_table(results: Sequence[Result]) -> str:
    """Table 2: the hidden task, per cent of each task's best-quantile return.

    The mean is over both tasks; the worst task stands beside it, because a policy that guesses
    one direction scores about 100 on one task and 0 on the other.
    """
    seeds = values_of(results, "seed")
    rows = []
    by_seed = {seed: hidden_scores(results, seed) for seed in seeds}
    for context, label in CONTEXTS.items():
        every = [by_seed[seed][context] for seed in seeds]
        for seed, tasks in zip(seeds, every, strict=True):
            rows.append([label, f"seed {seed}", *_hidden_cells([tasks])])
        if len(seeds) > 1:
            rows.append([label, "pooled", *_hidden_cells(every)])
    return table(["context", "seed", "mean of tasks [95 %]", "worst task", "rollouts"], rows)


def strata(seeds: Sequence[dict[str, np.ndarray]]) -> dict[str, list[np.ndarray]]:
    """Values of each training seed by task → by task, those of each training seed."""
    return {task: [tasks[task] for tasks in seeds] for task in seeds[0]}


def _hidden_cells(seeds: Sequence[dict[str, np.ndarray]]) -> list[str]:
    scores = strata(seeds)
    means = {task: np.concatenate(of_seeds).mean() for task, of_seeds in scores.items()}
    worst = min(means, key=lambda task: means[task])
    rollouts = " + ".join(str(sum(map(len, of_seeds))) for of_seeds in scores.values())
    estimate = stratified(list(scores.values()), np.mean)
    return [shown(estimate), f"{means[worst]:.1f} ({worst})", rollouts]


def _seeds(per_seed: Sequence[np.ndarray], seeds: Sequence[int]) -> str:
    return ", ".join(f"{s}: {v.mean():.1f}" for s, v in zip(seeds, per_seed, strict=True))
