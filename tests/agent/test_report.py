"""Tables and plots from results whose numbers are known."""

import numpy as np
import pytest

from agent import report, tables
from agent import results as stored
from agent.results import Result, select

RUN, BACK = "cheetah_run", "cheetah_run_backward"


def results(method: str, seed: int, task: str, context: str, returns, best: float) -> list[Result]:
    return [
        Result(
            method,
            seed,
            task,
            context,
            4,
            1.0,
            chain,
            0,
            episode,
            value,
            best,
            100 * value / best,
            value / 10,
            "stale" * (episode > 0),
        )
        for chain, row in enumerate(returns)
        for episode, value in enumerate(row)
    ]


def hidden() -> list[Result]:
    found = []
    for seed in (0, 1):
        for task, first in ((RUN, 0.0), (BACK, 90.0)):
            found += results("at", seed, task, "self", [[first, 95.0], [first, 97.0]], 100.0)
            found += results("at", seed, task, "dataset_sorted", [[96.0], [98.0 + seed]], 100.0)
            found += results("at", seed, task, "wrong_task", [[1.0], [3.0]], 100.0)
    return found


def cells(table: str, *starts: str) -> list[str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    matching = [row for row in rows if row[: len(starts)] == list(starts)]
    assert len(matching) == 1, table
    return matching[0]


def test_the_hidden_table_shows_the_worst_task_and_pools_seeds():
    shown = tables.hidden_table(hidden())
    none = cells(shown, "no context", "seed 0")
    # Tasks are strata: chains that are alike within each leave the mean no room.
    assert none[2] == "45.0 [45.0, 45.0]" and none[3] == "0.0 (cheetah_run)"
    assert none[4] == "2 + 2"
    pooled = cells(shown, "own-task context", "pooled")
    assert pooled[2].startswith("97.2 [") or pooled[2].startswith("97.3 [")
    assert pooled[4] == "4 + 4"
    assert cells(shown, "no context", "pooled")[2] == "45.0 [45.0, 45.0]"
    assert cells(shown, "self-generated, last episode", "seed 1")[2].startswith("96.0 [")


def test_the_comparison_table_by_hand():
    single = results("at", 0, RUN, "self", [[10.0, 30.0], [20.0, 20.0]], 100.0)
    single += results("bc10", 0, RUN, "self", [[5.0, 7.0]], 100.0)
    single += results("dt", 0, RUN, "self", [[1.0, 3.0], [2.0, 2.0]], 100.0)
    shown = tables.comparison_table(single, RUN, np.array([0.0, 50.0]), 4.0)
    assert cells(shown, "training data", "best")[2] == "50.0"
    assert cells(shown, "AT", "first")[2].startswith("15.0 [")
    assert cells(shown, "AT", "last")[2].startswith("25.0 [")
    assert cells(shown, "AT", "max of 2")[2].startswith("25.0 [")
    assert cells(shown, "DT", "best of 2")[2].startswith("2.5 [")
    assert cells(shown, "BC-10 %", "mean")[2:4] == ["6.0 [6.0, 6.0]", "1 × 1 chains × 2"]


def alike(seeds: int) -> list[Result]:
    """Chains of each training seed alike, seeds far apart."""
    return [
        row
        for seed in range(seeds)
        for method in ("bc10", "dt", "at")
        for row in results(method, seed, RUN, "self", [[20.0 * seed, 20.0 * seed]] * 4, 100.0)
    ]


def test_seeds_are_strata_too_and_resampled_from_five_on(tmp_path, monkeypatch):
    bars, bar = [], report._error_bar
    monkeypatch.setattr(report, "_error_bar", lambda *at: bars.append(at[-1]) or bar(*at))
    for seeds, narrow in ((4, True), (5, False)):
        table = tables.comparison_table(alike(seeds), RUN, np.array([0.0, 50.0]), 4.0)
        mean = 10.0 * (seeds - 1)
        assert (cells(table, "AT", "mean")[2] == f"{mean:.1f} [{mean:.1f}, {mean:.1f}]") == narrow
        report.plot_returns(tmp_path / "returns.png", alike(seeds), RUN, np.array([1.0, 9.0]))
        assert tables.shown(bars[-1]) == cells(table, "AT", "mean")[2]
    report.plot_hidden(tmp_path / "hidden.png", hidden())
    shown = tables.hidden_table(hidden())
    assert [tables.shown(each) for each in bars[-4:]] == [
        cells(shown, label, "pooled")[2] for label in tables.CONTEXTS.values()
    ]


def test_missing_results_are_refused():
    broken = results("at", 0, RUN, "self", [[1.0, 2.0], [3.0, 4.0]], 10.0)[:-1]
    with pytest.raises(ValueError, match="do not fill 2 chains × 1 environments × 2 episodes"):
        stored.grid(broken)


def test_environments_are_averaged_within_chains_and_units_under_a_lone_one():
    def rows(chains: int) -> list[Result]:
        first = results("at", 0, RUN, "dataset_sorted", [[1.0], [3.0]][:chains], 10.0)
        second = [r._replace(env=1, episode_return=r.episode_return + 4) for r in first]
        return first + second

    assert stored.grid(rows(2)).tolist() == [[3.0], [5.0]]
    assert stored.grid(rows(1)).tolist() == [[1.0], [5.0]]
    row = cells(tables.evaluation_table(rows(1)), RUN)
    assert row[5].startswith("3.0 [1.0, 5.0") and row[-2] == "1 × 2 × 1"
    assert row[-1] == "one context, interval over environments"


def test_the_largest_return_is_that_of_each_environment():
    """Of two that take turns in being good it is not the largest of their means."""
    one = results("at", 0, RUN, "dataset_sorted", [[9.0, 1.0], [8.0, 2.0]], 10.0)
    other = results("at", 0, RUN, "dataset_sorted", [[1.0, 7.0], [2.0, 6.0]], 10.0)
    rows = one + [row._replace(env=1) for row in other]
    assert tables.summary(rows, "max").tolist() == [8.0, 7.0]
    assert tables.summary(rows, "last").tolist() == [4.0, 4.0]
    row = cells(tables.evaluation_table(rows), RUN, "dataset_sorted", "4", "1", "max")
    assert row[5].startswith("7.5 [7.0, 8.0]")
    lone = [row for row in rows if row.chain == 0]
    assert tables.summary(lone, "max").tolist() == [9.0, 7.0]


def test_the_table_of_one_evaluation_has_every_cell():
    shown = tables.evaluation_table([r for r in hidden() if r.seed == 0])
    assert len(shown.splitlines()) == 2 + 2 * (5 + 1 + 1)
    assert cells(shown, RUN, "dataset_sorted", "4", "1", "episode")[5].startswith("97.0 [")


def test_plots_are_png_files(tmp_path):
    single = results("at", 0, RUN, "self", [[10.0, 30.0], [20.0, 25.0]], 100.0)
    report.plot_returns(tmp_path / "returns.png", single, RUN, np.array([1.0, 9.0]))
    report.plot_in_context(tmp_path / "in_context.png", hidden())
    report.plot_hidden(tmp_path / "hidden.png", hidden())
    references = {name: report.Reference(4.0, np.array([1.0, 9.0, 90.0])) for name in (RUN, BACK)}
    report.plot_episodes(tmp_path / "episodes.png", select(hidden(), seed=0), references)
    longer = [r._replace(n=8, multiplier=2.0, target=2 * r.target) for r in hidden()]
    baselines = results("bc", 0, RUN, "self", [[1.0] * 5], 100.0)
    baselines += results("bc", 0, BACK, "self", [[1.0] * 9], 100.0)
    baselines += [row._replace(seed=1) for row in baselines]
    both = [*select(hidden(), seed=0), *select(longer, seed=0)]
    report.plot_lengths(tmp_path / "lengths.png", both, baselines, references)
    report.plot_targets(tmp_path / "targets.png", both, references)
    report.plot_profiles(tmp_path / "profiles.png", both, baselines)
    drawn = sorted(tmp_path.iterdir())
    assert [path.name for path in drawn] == [
        "episodes.png",
        "hidden.png",
        "in_context.png",
        "lengths.png",
        "profiles.png",
        "returns.png",
        "targets.png",
    ]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in drawn)


def test_how_often_a_chain_beats_a_baselines():
    ours = results("at", 0, RUN, "self", [[10.0, 30.0], [20.0, 20.0]], 100.0)
    theirs = results("bc10", 0, RUN, "self", [[5.0, 25.0], [30.0, 28.0]], 100.0)
    row = cells(tables.improvement_table(ours, theirs), "self", "4", "1", "BC-10 %")
    assert row[4:] == ["0.50", "0.38", "2 and 2"]  # means 20, 20 to 15, 29; max 30, 20 to 25, 30
    theirs = results("bc10", 0, RUN, "self", [[5.0, 25.0, 30.0]], 100.0)
    row = cells(tables.improvement_table(ours, theirs), "self", "4", "1", "BC-10 %")
    assert row[4:] == ["0.50", "", "2 and 3"]  # the largest of three is larger by itself
