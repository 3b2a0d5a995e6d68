"""Command lines: help with examples, errors for people, and one checkpoint that tells all."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NAMES = ("collect", "compare", "download", "evaluate", "pack", "relabel", "train", "tune", "verify")
NAMES += ("plan", "train_walker_run")


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
    again = run(*command)
    assert again.returncode == 0 and "started" not in again.stdout


@pytest.mark.slow
def test_an_evaluation_is_finished_once_and_drawn(cheetah_store, tmp_path):
    """Several n and contexts, plots, videos; the second time nothing is rolled out."""
    trained = ("scripts.train", "tiny", "--run", tmp_path / "run", "--optimizer.steps", 2)
    trained += ("--data.store", cheetah_store.path, "--data.tasks", "cheetah_run")
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
