"""Tables and plots from results whose numbers are known."""

import numpy as np
import pytest

from agent import report
from agent.evaluation import Result

RUN, BACK = "cheetah_run", "cheetah_run_backward"


def results(method: str, seed: int, task: str, context: str, returns, best: float) -> list[Result]:
    return [
        Result(method, seed, task, context, chain, episode, value, 100 * value / best)
        for chain, row in enumerate(returns)
        for episode, value in enumerate(row)
    ]


def hidden() -> list[Result]:
    found = []
    for seed in (0, 1):
        for task, first in ((RUN, 0.0), (BACK, 90.0)):
            found += results("at", seed, task, "self", [[first, 95.0], [first, 97.0]], 100.0)
            found += results("at", seed, task, "dataset", [[96.0], [98.0 + seed]], 100.0)
            found += results("at", seed, task, "wrong_task", [[1.0], [3.0]], 100.0)
    return found


def cells(table: str, *starts: str) -> list[str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    matching = [row for row in rows if row[: len(starts)] == list(starts)]
    assert len(matching) == 1, table
    return matching[0]


def test_the_hidden_table_shows_the_worst_task_and_pools_seeds():
    table = report.hidden_table(hidden())
    none = cells(table, "no context", "seed 0")
    assert none[2].startswith("45.0 [") and none[3] == "0.0 (cheetah_run)"
    assert none[4] == "2 + 2"
    pooled = cells(table, "own-task context", "pooled")
    assert pooled[2].startswith("97.2 [") or pooled[2].startswith("97.3 [")
    assert pooled[4] == "4 + 4"
    assert cells(table, "self-generated, last episode", "seed 1")[2].startswith("96.0 [")


def test_the_comparison_table_by_hand():
    single = results("at", 0, RUN, "self", [[10.0, 30.0], [20.0, 20.0]], 100.0)
    single += results("bc10", 0, RUN, "self", [[5.0, 7.0]], 100.0)
    single += results("dt", 0, RUN, "self", [[1.0, 3.0], [2.0, 2.0]], 100.0)
    table = report.comparison_table(single, RUN, np.array([0.0, 50.0]), 4.0)
    assert cells(table, "training data", "best")[2] == "50.0"
    assert cells(table, "AT", "first")[2].startswith("15.0 [")
    assert cells(table, "AT", "last")[2].startswith("25.0 [")
    assert cells(table, "AT", "max of 2")[2].startswith("25.0 [")
    assert cells(table, "DT", "best of 2")[2].startswith("2.5 [")
    assert cells(table, "BC-10 %", "mean")[2:4] == ["6.0 [6.0, 6.0]", "1 × 1 chains × 2"]


def test_missing_results_are_refused():
    broken = results("at", 0, RUN, "self", [[1.0, 2.0], [3.0, 4.0]], 10.0)[:-1]
    with pytest.raises(ValueError, match="do not fill 2 chains × 2 episodes"):
        report.grid(broken)


def test_the_table_of_one_evaluation_has_every_cell():
    table = report.evaluation_table([r for r in hidden() if r.seed == 0])
    assert len(table.splitlines()) == 2 + 2 * (4 + 1 + 1)
    assert cells(table, RUN, "dataset", "episode")[3].startswith("97.0 [")


def test_plots_are_png_files(tmp_path):
    single = results("at", 0, RUN, "self", [[10.0, 30.0], [20.0, 25.0]], 100.0)
    report.plot_returns(tmp_path / "returns.png", single, RUN, np.array([1.0, 9.0]))
    report.plot_in_context(tmp_path / "in_context.png", hidden())
    report.plot_hidden(tmp_path / "hidden.png", hidden())
    drawn = sorted(tmp_path.iterdir())
    assert [path.name for path in drawn] == ["hidden.png", "in_context.png", "returns.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in drawn)
