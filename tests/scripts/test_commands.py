"""Command lines: help with examples, errors for people, and one checkpoint that tells all."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent import checkpoint, results
from agent.config import DataConfig, TrainConfig
from scripts import compare, evaluate, tune
from scripts.evaluate import Evaluate

ROOT = Path(__file__).parent.parent.parent
NAMES = ("collect", "compare", "download", "evaluate", "pack", "relabel", "train", "tune", "verify")
NAMES += ("measure_random", "plan", "render", "train_walker_run")


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *(str(each) for each in arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", NAMES)
def test_help_explains_itself_with_an_example(name):
    done = run(f"scripts.{name}", "--help")
    assert done.returncode == 0
    assert "Example" in done.stdout and f"python -m scripts.{name}" in done.stdout


def test_a_store_that_is_not_there(tmp_path):
    done = run("scripts.relabel", "--store", tmp_path / "none")
    assert done.returncode == 2
    assert done.stderr.startswith("exoring: error:") and "pack one first" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_that_was_never_trained(tmp_path):
    done = run("scripts.evaluate", "--checkpoint", tmp_path)
    assert done.returncode == 2
    assert "no complete checkpoint" in done.stderr and "scripts.train" in done.stderr


def test_an_unknown_task_names_the_closest(cheetah_store, tmp_path):
    done = run(
        "scripts.train",
        "tiny",
        "--run",
        tmp_path / "run",
        "--data.store",
        cheetah_store.path,
        "--data.tasks",
        "cheetah_runn",
    )
    assert done.returncode == 2
    assert "cheetah_run" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "twice", [{"n": (2, 4, 2)}, {"context": ("self", "self")}, {"multiplier": (1.0, 1.0)}]
)
def test_what_is_asked_for_twice_is_refused(tmp_path, twice):
    with pytest.raises(ValueError, match=f"--{next(iter(twice))} .* twice; give each once"):
        evaluate.main(Evaluate(checkpoint=tmp_path, **twice))


def test_matplotlib_is_missed_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"exoring\[plots\].*--no-plots"):
        evaluate.main(Evaluate(checkpoint=tmp_path))
    with pytest.raises(ModuleNotFoundError, match=r"exoring\[plots\].*--no-plots"):
        compare.main(compare.Compare(run=tmp_path, data=tmp_path))


def test_baselines_that_cannot_be_compared_with_are_refused_early(tmp_path, monkeypatch):
    tasks = ("cheetah_run", "cheetah_run_backward")
    ours = TrainConfig(tmp_path, DataConfig(store=tmp_path, tasks=tasks))
    monkeypatch.setattr(checkpoint, "read_config", lambda run: ours)

    def evaluated(name: str, seed: int, *tasks: str) -> Path:
        rows = [
            results.Result("bc", seed, task, "self", 1, 1.0, 0, 0, 0, 5.0, 9.0, 50.0, 1.0, "")
            for task in tasks
        ]
        results.write_csv(tmp_path / name / "evaluation" / "results.csv", rows)
        return tmp_path / name

    runs = [evaluated("first", 0, *tasks, "cheetah_walk"), evaluated("second", 1, *tasks)]
    runs += [evaluated("again", 1, *tasks), evaluated("half", 2, tasks[0])]
    assert len(evaluate._baselines(Evaluate(tmp_path, against=tuple(runs[:2])))) == 4
    with pytest.raises(ValueError, match=r"half.* holds nothing of cheetah_run_backward"):
        evaluate._baselines(Evaluate(tmp_path, against=(runs[0], runs[3])))
    with pytest.raises(ValueError, match="again is of method bc and training seed 1, and so is"):
        evaluate._baselines(Evaluate(tmp_path, against=tuple(runs[:3])))


def test_a_point_of_a_grid_that_was_stopped_is_not_shown_as_done(tmp_path):
    lines = [{"step": 5, "steps_per_second": 2.0}, {"step": 10, "steps_per_second": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert tune._seconds(tmp_path, 10) == 5
    with pytest.raises(ValueError, match="was stopped after update 10 of 20; run the same command"):
        tune._seconds(tmp_path, 20)


def test_relabel_prints_returns_of_every_task(cheetah_store):
    done = run("scripts.relabel", "--store", cheetah_store.path)
    assert done.returncode == 0, done.stderr
    assert "cheetah_run " in done.stdout and "cheetah_run_backward" in done.stdout


@pytest.mark.slow
def test_the_whole_comparison_at_smoke_size(tmp_path):
    """Collect, pack, train, evaluate, report; then the same from what is there."""
    command = ("scripts.compare", "smoke", "--run", tmp_path / "run", "--data", tmp_path / "data")
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("report.md", "results.csv", "returns.png", "in_context.png", "hidden.png"):
        assert (tmp_path / "run" / name).stat().st_size > 100
    tables = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert any("own-task context" in line for line in tables)

    # One checkpoint alone reproduces its numbers.
    agent = tmp_path / "run" / "seed0" / "hidden"
    kept = agent / "evaluation"
    before = (kept / "results.csv").read_text()
    shutil.move(kept, tmp_path / "kept")
    alone = run("scripts.evaluate", "--checkpoint", agent, "--chains", 2)
    assert alone.returncode == 0, alone.stderr
    assert (kept / "results.csv").read_text() == before

    again = run(*command)
    assert again.returncode == 0
    assert [line for line in again.stdout.splitlines() if line.startswith("|")] == tables


@pytest.mark.slow
def test_a_grid_of_settings_is_trained_evaluated_and_not_repeated(cheetah_store, tmp_path):
    command = ("scripts.tune", "--preset", "tiny", "--store", cheetah_store.path)
    command += ("--task", "cheetah_run", "--learning-rates", "1e-3", "3e-3", "--widths", "16")
    command += ("--rollouts", "2", "--out", tmp_path)
    done = run(*command)
    assert done.returncode == 0, done.stderr
    for rate in ("0.001", "0.003"):
        assert f"\n| {rate}         | 16    | " in done.stdout
    assert (tmp_path / "tiny.md").read_text() in done.stdout
    found = {path: path.read_text() for path in tmp_path.glob("*/evaluation/cells.jsonl")}
    assert len(found) == 2
    more = run(*command, "--rollouts", 3)
    assert more.returncode == 0 and ", 3 chains a seed" in more.stdout
    for path, cells in found.items():  # of each, one chain was added
        assert path.read_text().startswith(cells) and len(path.read_text().splitlines()) == 3
    for log in (tmp_path / "logs").glob("*.log"):  # each was resumed, if only to say it is done
        said = log.read_text()
        assert "scripts.train" in said and "trained: " in said and "compiled    n" not in said


@pytest.mark.slow
def test_an_evaluation_is_finished_once_and_drawn(cheetah_store, whole_store, tmp_path):
    """Several n and contexts, plots, videos; the second time nothing is rolled out."""
    trained = ("scripts.train", "tiny", "--run", tmp_path / "run", "--optimizer.steps", 2)
    store = Path(shutil.copytree(whole_store.path, tmp_path / "store"))
    trained += ("--data.store", store, "--data.tasks", "cheetah_run")
    assert run(*trained).returncode == 0
    command = ("scripts.evaluate", "--checkpoint", tmp_path / "run", "--chains", 2)
    command += ("--context", "self", "dataset_sorted", "--n", 1, 2, "--multiplier", 1, 1.5)
    done = run(*command, "--video")
    assert done.returncode == 0, done.stderr
    out = tmp_path / "run" / "evaluation"
    for name in ("returns.png", "lengths.png", "targets.png", "results.csv"):
        assert (out / name).stat().st_size > 100
    cells = (out / "cells.jsonl").read_text()
    assert len(cells.splitlines()) == 2 * 2 * 2 * 2  # contexts, n, multipliers, chains
    assert len(list((out / "videos").glob("*.npz"))) == 2 * (1 + 1 + 1 + 3)
    if "cannot draw" not in done.stderr:
        gifs = list((out / "videos").glob("*.gif"))
        assert gifs and all(gif.read_bytes()[:3] == b"GIF" for gif in gifs)
    few = ("scripts.evaluate", "--checkpoint", tmp_path / "run", "--chains", 2, "--no-plots")
    around = run(*few, "--n", 2, "--ring", 2, "--out", tmp_path / "ring")
    assert around.returncode == 0, around.stderr
    refused = run(*command, "--against", tmp_path / "run")
    assert refused.returncode == 2 and "holds 8 contexts, n and multipliers" in refused.stderr
    cloned = ("scripts.train", "demo_bc10", *trained[2:], "--run", tmp_path / "bc10")
    assert run(*cloned).returncode == 0
    rolled = run("scripts.evaluate", "--checkpoint", tmp_path / "bc10", "--chains", 2)
    assert rolled.returncode == 0, rolled.stderr
    beside = run(*command, "--against", tmp_path / "bc10")
    assert beside.returncode == 0, beside.stderr
    assert "Chains beside those of baselines" in beside.stdout
    assert (out / "profiles.png").stat().st_size > 100
    again = run(*command)
    assert (out / "cells.jsonl").read_text() == cells
    assert [line for line in again.stdout.splitlines() if line.startswith("|")] == [
        line for line in done.stdout.splitlines() if line.startswith("|")
    ]
    assert again.stdout.splitlines()[-1] == f"every episode's return, plots: {out}"
    shutil.rmtree(out / "videos")
    without = run(*few, "--context", "self", "--n", 2, "--video")
    assert "no video of cheetah_run-self-n2-x1: the first chain was finished" in without.stdout
    shutil.rmtree(store)
    shutil.copytree(cheetah_store.path, store)
    refused = run(*few, "--n", 2)
    assert refused.returncode == 2 and "was trained on other episodes" in refused.stderr
