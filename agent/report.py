"""Tables, CSV and plots of evaluated runs; matplotlib is imported only here."""

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agent.evaluation import Result
from agent.statistics import SUMMARIES, Estimate, bootstrap

NAMES = {"at": "AT", "dt": "DT", "dt_long": "DT-long", "bc": "BC", "bc10": "BC-10 %"}
CONTEXTS = {
    "none": "no context",
    "dataset": "own-task context",
    "wrong_task": "wrong-task context",
    "self": "self-generated, last episode",
}
"""Columns of the hidden-task table in reading order; `none` is the first self-generated episode."""


def grid(results: Sequence[Result], field: str = "episode_return") -> np.ndarray:
    """Results of one agent, task and context as ``[chains, episodes]``.

    Raises:
        ValueError: a cell is missing or there twice.
    """
    cells = {(each.chain, each.episode): getattr(each, field) for each in results}
    chains, episodes = (1 + max(key[axis] for key in cells) for axis in (0, 1))
    if not len(cells) == len(results) == chains * episodes:
        raise ValueError(
            f"{len(results)} results do not fill {chains} chains × {episodes} episodes"
        )
    return np.array([[cells[row, column] for column in range(episodes)] for row in range(chains)])


def select(results: Sequence[Result], **wanted: Any) -> list[Result]:
    """Results whose fields have the given values."""
    return [r for r in results if all(getattr(r, name) == value for name, value in wanted.items())]


def values_of(results: Sequence[Result], field: str) -> list[Any]:
    """Distinct values of a field, sorted."""
    return sorted({getattr(each, field) for each in results})


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns, readable as plain text too."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def evaluation_table(results: Sequence[Result]) -> str:
    """What `scripts.evaluate` prints: every task and context of one agent."""
    rows = []
    for task in values_of(results, "task"):
        for context in values_of(results, "context"):
            chosen = select(results, task=task, context=context)
            raw, percent = grid(chosen), grid(chosen, "percent")
            summaries = SUMMARIES if raw.shape[1] > 1 else {"episode": SUMMARIES["first"]}
            for name, summary in summaries.items():
                rows.append(
                    [
                        task,
                        context,
                        name,
                        shown(bootstrap(summary(raw))),
                        shown(bootstrap(summary(percent))),
                        f"{raw.shape[0]} × {raw.shape[1]}",
                    ]
                )
    header = ["task", "context", "statistic", "return [95 %]", "per cent of best", "n × episodes"]
    return table(header, rows)


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
        for context in ("dataset", "wrong_task"):
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


def versions() -> str:
    """The libraries that a score depends on."""
    names = ("exoring", "jax", "flax", "optax", "mujoco", "dm-control", "numpy")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def plot_returns(path: Path, results: Sequence[Result], task: str, dataset: np.ndarray) -> None:
    """Returns with spread: every chain's mean a dot, the method's mean with its interval.

    Args:
        path: of the PNG.
        results: of all methods.
        task: whose returns.
        dataset: ``[N]`` returns of the training episodes, for comparison.
    """

    def draw(axes: Any) -> None:
        methods = [m for m in ("bc10", "dt", "at") if select(results, method=m, task=task)]
        for place, method in enumerate(methods):
            chosen = select(results, method=method, task=task, context="self")
            means = np.concatenate(
                [grid(select(chosen, seed=seed)).mean(axis=1) for seed in values_of(chosen, "seed")]
            )
            jitter = np.random.default_rng(0).uniform(-0.15, 0.15, len(means))
            axes.scatter(place + jitter, means, s=12, alpha=0.4, color=f"C{place}")
            _error_bar(axes, place, bootstrap(means))
        axes.axhline(dataset.max(), color="grey", linestyle="--", label="training data, best")
        axes.axhline(dataset.mean(), color="grey", linestyle=":", label="training data, mean")
        axes.legend(loc="lower left")
        axes.set_xticks(range(len(methods)), [NAMES[method] for method in methods])
        axes.set_ylim(bottom=0)
        axes.set_ylabel("mean return of a chain")
        axes.set_title(
            f"{task}, {_which_seeds(results)}\ndots: chains; bars: mean, 95 % over chains"
        )

    figure(path, draw)


def plot_in_context(path: Path, results: Sequence[Result]) -> None:
    """Return against in-context episode: one faint line a chain, the mean of each task bold."""

    def draw(axes: Any) -> None:
        own = select(results, context="self")
        for place, task in enumerate(values_of(own, "task")):
            grids = [
                grid(select(own, task=task, seed=seed), "percent")
                for seed in values_of(own, "seed")
            ]
            joined = np.concatenate(grids)
            episodes = np.arange(1, joined.shape[1] + 1)
            axes.plot(episodes, joined.T, color=f"C{place}", alpha=0.12, linewidth=1)
            axes.plot(episodes, joined.mean(axis=0), color=f"C{place}", marker="o", label=task)
            axes.set_xticks(episodes)
        axes.set_xlabel("self-generated episode in one context")
        axes.set_ylabel("% of the task's best-quantile return")
        axes.set_title(f"Hidden task, {_which_seeds(results)}\nfaint: chains; bold: mean of chains")
        axes.legend()

    figure(path, draw)


def plot_hidden(path: Path, results: Sequence[Result]) -> None:
    """Hidden-task bars: mean of both tasks with interval, dots for each task and seed."""

    def draw(axes: Any) -> None:
        seeds = values_of(results, "seed")
        for place, context in enumerate(CONTEXTS):
            by_task = [hidden_scores(results, seed)[context] for seed in seeds]
            every = np.concatenate([scores for tasks in by_task for scores in tasks.values()])
            axes.bar(place, every.mean(), color=f"C{place}", alpha=0.5)
            _error_bar(axes, place, bootstrap(every))
            for tasks in by_task:
                means = [scores.mean() for scores in tasks.values()]
                axes.scatter([place] * len(means), means, color="black", s=14, zorder=3)
        labels = [
            label.replace(", ", ",\n").replace(" context", "\ncontext")
            for label in CONTEXTS.values()
        ]
        axes.set_xticks(range(len(CONTEXTS)), labels)
        axes.set_ylabel("% of the task's best-quantile return")
        axes.set_title(
            f"Hidden task, {_which_seeds(results)}\nbars: mean of tasks, 95 % over chains; "
            f"dots: each task and seed"
        )

    figure(path, draw)


def _which_seeds(results: Sequence[Result]) -> str:
    return f"seeds {', '.join(map(str, values_of(results, 'seed')))}"


def _error_bar(axes: Any, place: float, estimate: Estimate) -> None:
    below, above = estimate.mean - estimate.low, estimate.high - estimate.mean
    axes.errorbar(place, estimate.mean, [[below], [above]], fmt="_", color="black", capsize=6)


def figure(path: Path, draw: Callable[[Any], None], size: tuple[float, float] = (6, 4)) -> None:
    """Draw on one pair of axes, and write the PNG whole or not at all.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'plots need matplotlib: pip install "exoring[plots]", or pass --no-plots'
        ) from error
    canvas = Figure(figsize=size, layout="constrained")
    draw(canvas.add_subplot())
    unfinished = path.with_name(f".{path.name}")
    canvas.savefig(unfinished, dpi=150, format="png")
    os.replace(unfinished, path)
