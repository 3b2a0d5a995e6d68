"""Tables of evaluated runs, readable as plain text and as Markdown."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from agent.results import Result, grid, select, values_of
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
        fields = [grid(chosen, name) for name in ("episode_return", "normalized", "percent")]
        episodes = fields[0].shape[1]
        summaries = SUMMARIES if episodes > 1 else {"episode": SUMMARIES["first"]}
        for name, summary in summaries.items():
            cells = [task, context, str(n), f"{multiplier:g}", name]
            cells += [shown(bootstrap(summary(field))) for field in fields]
            rows.append([*cells, _size(chosen), _labels(chosen)])
    header = ["task", "context", "n", "× target", "statistic", "return [95 %]", "normalised"]
    return table([*header, "% of attainable", "chains × envs × episodes", "labels"], rows)


def aggregate_table(results: Sequence[Result]) -> str:
    """Mean and interquartile mean of normalised scores over all tasks, by protocol."""
    rows = []
    for context, n, multiplier in sorted({at[1:] for at in protocols_of(results)}):
        chosen = select(results, context=context, n=n, multiplier=multiplier)
        tasks = [select(chosen, task=task) for task in values_of(chosen, "task")]
        alone = len(values_of(chosen, "episode")) == 1
        for name in ("first",) if alone else ("first", "last", "mean", "max"):
            scores = [
                [
                    SUMMARIES[name](grid(select(task, seed=seed), "normalized"))
                    for seed in values_of(task, "seed")
                ]
                for task in tasks
            ]
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
            for name in ("mean", "max"):
                pairs = [
                    [
                        [
                            SUMMARIES[name](grid(select(part, task=task, seed=seed)))
                            for seed in values_of(select(part, task=task), "seed")
                        ]
                        for task in values_of(results, "task")
                    ]
                    for part in (ours, theirs)
                ]
                cells.append(f"{improvement(*pairs):.2f}")
            episodes = (len(values_of(each, "episode")) for each in (ours, theirs))
            rows.append([*cells, " and ".join(map(str, episodes))])
    header = ["context", "n", "× target", "against", "P(mean is higher)", "P(max is higher)"]
    return table([*header, "episodes a chain"], rows)


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
            grids = [grid(select(chosen, seed=seed)) for seed in seeds]
            per_seed = [SUMMARIES[statistic](each) for each in grids]
            chains, episodes = grids[0].shape
            rows.append(
                [
                    NAMES[method],
                    label.format(n=episodes),
                    shown(bootstrap(np.concatenate(per_seed))),
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
        pooled = []
        for seed in seeds:
            tasks = by_seed[seed][context]
            pooled.append(np.concatenate(list(tasks.values())))
            rows.append([label, f"seed {seed}", *_hidden_cells(tasks)])
        if len(seeds) > 1:
            joined = {
                task: np.concatenate([by_seed[seed][context][task] for seed in seeds])
                for task in by_seed[seeds[0]][context]
            }
            rows.append([label, "pooled", *_hidden_cells(joined)])
    return table(["context", "seed", "mean of tasks [95 %]", "worst task", "rollouts"], rows)


def _hidden_cells(tasks: dict[str, np.ndarray]) -> list[str]:
    means = {task: scores.mean() for task, scores in tasks.items()}
    worst = min(means, key=lambda task: means[task])
    rollouts = " + ".join(str(len(scores)) for scores in tasks.values())
    every = bootstrap(np.concatenate(list(tasks.values())))
    return [shown(every), f"{means[worst]:.1f} ({worst})", rollouts]


def _seeds(per_seed: Sequence[np.ndarray], seeds: Sequence[int]) -> str:
    return ", ".join(f"{s}: {v.mean():.1f}" for s, v in zip(seeds, per_seed, strict=True))
