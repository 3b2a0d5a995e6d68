"""Plots of evaluated runs; matplotlib is imported only here."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agent.results import Result, grid, select, values_of
from agent.statistics import Estimate, best_of, bootstrap, profile, stratified
from agent.tables import CONTEXTS, NAMES, hidden_scores, strata, summary
from exorl.paths import write_whole

ENDS = ("low", "high")
"""Of an interval, see `agent.statistics.Estimate`."""


class Reference(NamedTuple):
    """Raw returns to compare with.

    Attributes:
        random: of a uniformly random policy.
        dataset: ``[N]``, of the training episodes.
    """

    random: float
    dataset: np.ndarray


def plot_episodes(
    path: Path, results: Sequence[Result], references: Mapping[str, Reference]
) -> None:
    """Return against own episode in one context: chains faint, their mean bold with its interval.

    Args:
        path: of the PNG.
        results: of one agent, with one target; of several n, the longest is drawn.
        references: by task.
    """

    def draw(axes: Any, task: str) -> None:
        _bands(axes, references[task])
        of_task = select(results, task=task)
        for place, context in enumerate(values_of(of_task, "context")):
            of_context = select(of_task, context=context)
            n = max(r.n for r in of_context)
            returns = grid(select(of_context, n=n))
            episodes, color = np.arange(1, returns.shape[1] + 1), f"C{place}"
            axes.plot(episodes, returns.T, color=color, alpha=0.15, linewidth=0.8)
            intervals = [bootstrap(column) for column in returns.T]
            marker = "o" if len(episodes) < 12 else None
            label = f"{context}, n = {n}"
            axes.plot(
                episodes, returns.mean(axis=0), color=color, marker=marker, linewidth=2, label=label
            )
            low, high = ([getattr(each, end) for each in intervals] for end in ENDS)
            axes.fill_between(episodes, low, high, color=color, alpha=0.25, linewidth=0)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("own episode of the chain")

    _by_task(path, results, "faint: chains; bold: mean, 95 % over chains", draw)


def plot_lengths(
    path: Path,
    results: Sequence[Result],
    baselines: Sequence[Result],
    references: Mapping[str, Reference],
) -> None:
    """Return against n, beside the best of n independent episodes of the baselines.

    Args:
        path: of the PNG.
        results: of one agent for several n, with one target.
        baselines: of other methods, at least n episodes each.
        references: by task.
    """

    def draw(axes: Any, task: str) -> None:
        _bands(axes, references[task])
        of_task = select(results, task=task)
        for place, context in enumerate(values_of(of_task, "context")):
            chosen = select(of_task, context=context)
            lengths = values_of(chosen, "n")
            several = len(values_of(select(chosen, n=lengths[-1]), "episode")) > 1
            names = ("first", "mean", "last", "max") if several else ("first",)
            for name, style in zip(names, ("o-", "s--", "^-", "d:"), strict=False):
                estimates = [bootstrap(summary(select(chosen, n=n), name)) for n in lengths]
                label = f"{context}, {name if len(names) > 1 else 'one episode'}"
                means = [each.mean for each in estimates]
                axes.plot(lengths, means, style, color=f"C{place}", label=label)
                if name == ("last" if len(names) > 1 else "first"):
                    low, high = ([getattr(each, end) for each in estimates] for end in ENDS)
                    axes.fill_between(lengths, low, high, color=f"C{place}", alpha=0.15, lw=0)
        for place, method in enumerate(values_of(baselines, "method")):
            found = select(baselines, method=method, task=task)  # of all seeds
            episodes = np.array([each.episode_return for each in found])
            lengths = [n for n in values_of(of_task, "n") if n <= len(episodes)]
            best = [best_of(episodes, n) for n in lengths]
            axes.plot(
                lengths, best, "x:", color=f"C{7 + place}", label=f"{NAMES[method]}, best of n"
            )
        axes.set_xscale("log", base=2)
        lengths = values_of(of_task, "n")
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.set_xlabel("n, trajectories in the sequence")

    _by_task(path, results, "bands of last and of lone episodes: 95 % over chains", draw)


def plot_targets(
    path: Path, results: Sequence[Result], references: Mapping[str, Reference]
) -> None:
    """Return achieved against return asked for, with the line where they are equal."""

    def draw(axes: Any, task: str) -> None:
        _bands(axes, references[task])
        of_task = select(results, task=task)
        for place, (context, n) in enumerate(sorted({(r.context, r.n) for r in of_task})):
            points = []
            of_line = select(of_task, context=context, n=n)
            for multiplier in values_of(of_line, "multiplier"):
                chosen = select(of_line, multiplier=multiplier)
                points.append((grid(chosen, "target").mean(), bootstrap(grid(chosen).mean(axis=1))))
            asked = [point[0] for point in points]
            axes.plot(
                asked,
                [e.mean for _, e in points],
                "o-",
                color=f"C{place}",
                label=f"{context}, n = {n}",
            )
            low, high = ([getattr(e, end) for _, e in points] for end in ENDS)
            axes.fill_between(asked, low, high, color=f"C{place}", alpha=0.2, linewidth=0)
        ends = [min(r.target for r in of_task), max(r.target for r in of_task)]
        axes.plot(ends, ends, color="black", linewidth=0.8, label="achieved = asked for")
        axes.set_xlabel("return asked for")

    _by_task(path, results, "mean of a chain's episodes; bands: 95 % over chains", draw)


def plot_profiles(path: Path, results: Sequence[Result], baselines: Sequence[Result]) -> None:
    """Part of all chains whose mean normalised score is above a threshold, all tasks together."""

    def draw(axes: Any) -> None:
        lines = {
            f"{NAMES[results[0].method]}, {context}, n = {n}": select(results, context=context, n=n)
            for context, n in sorted({(r.context, r.n) for r in results})
        }
        lines |= {NAMES[m]: select(baselines, method=m) for m in values_of(baselines, "method")}
        scores = {
            name: np.concatenate(
                [
                    grid(select(chosen, task=task, seed=seed), "normalized").mean(axis=1)
                    for task in values_of(chosen, "task")
                    for seed in values_of(select(chosen, task=task), "seed")
                ]
            )
            for name, chosen in lines.items()
        }
        every = np.concatenate(list(scores.values()))
        thresholds = np.linspace(every.min() - 1, every.max() + 1, 200)
        for name, values in scores.items():
            axes.plot(thresholds, profile(values, thresholds), label=f"{name} ({len(values)})")
        axes.set_xlabel("normalised score τ")
        axes.set_ylabel("part of chains whose mean is above τ")
        axes.legend(fontsize=7)
        axes.set_title(
            f"{', '.join(values_of(results, 'task'))}\n(in brackets: chains)", fontsize=10
        )

    figure(path, draw)


def _bands(axes: Any, reference: Reference) -> None:
    """Random policy and quantiles of the training data behind a plot."""
    middle, high, best = np.quantile(reference.dataset, [0.5, 0.9, 1])
    axes.axhspan(middle, high, color="grey", alpha=0.15, label="data, 50 to 90 %")
    axes.axhline(best, color="grey", linestyle="--", linewidth=1, label="data, best")
    axes.axhline(reference.random, color="grey", linestyle=":", linewidth=1, label="random policy")


def _by_task(
    path: Path, results: Sequence[Result], note: str, draw: Callable[[Any, str], None]
) -> None:
    """One plot of returns a task beside each other."""
    tasks = values_of(results, "task")

    def draw_all(canvas: Any) -> None:
        for axes, task in zip(canvas.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
            draw(axes, task)
            axes.set_title(task)
            axes.set_ylabel("return")
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=7)
        method = NAMES[results[0].method]
        chains = len(values_of(results, "chain"))
        canvas.suptitle(f"{method}, {_which_seeds(results)}, {chains} chains; {note}", fontsize=10)

    _save(path, draw_all, size=(6.5 * len(tasks), 4.5))


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
            means = [
                summary(select(chosen, seed=seed), "mean") for seed in values_of(chosen, "seed")
            ]
            chains = np.concatenate(means)
            jitter = np.random.default_rng(0).uniform(-0.15, 0.15, len(chains))
            axes.scatter(place + jitter, chains, s=12, alpha=0.4, color=f"C{place}")
            _error_bar(axes, place, stratified([means], np.mean))
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
            by_seed = [hidden_scores(results, seed)[context] for seed in seeds]
            estimate = stratified(list(strata(by_seed).values()), np.mean)
            axes.bar(place, estimate.mean, color=f"C{place}", alpha=0.5)
            _error_bar(axes, place, estimate)
            for tasks in by_seed:
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
    seeds = values_of(results, "seed")
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _error_bar(axes: Any, place: float, estimate: Estimate) -> None:
    below, above = estimate.mean - estimate.low, estimate.high - estimate.mean
    axes.errorbar(place, estimate.mean, [[below], [above]], fmt="_", color="black", capsize=6)


def figure(path: Path, draw: Callable[[Any], None], size: tuple[float, float] = (6, 4)) -> None:
    """Draw on one pair of axes, and write the PNG whole or not at all.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    _save(path, lambda canvas: draw(canvas.add_subplot()), size)


def matplotlib_figure() -> Any:
    """Matplotlib's `Figure`; worth asking for before work whose results are to be drawn.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'plots need matplotlib: pip install "exoring[plots]", or pass --no-plots'
        ) from error
    return Figure


def _save(path: Path, draw: Callable[[Any], None], size: tuple[float, float]) -> None:
    canvas = matplotlib_figure()(figsize=size, layout="constrained")
    draw(canvas)
    drawn = io.BytesIO()
    canvas.savefig(drawn, dpi=150, format="png")
    write_whole(path, drawn.getvalue())
