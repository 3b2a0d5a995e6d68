"""Runs that were stopped go on as if they had not been, here or on another mesh."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from agent import checkpoint, training
from agent.config import MeshConfig, ModelConfig, TrainConfig
from agent.sharding import make_mesh
from exorl import EpisodeStore, pack

ROOT = Path(__file__).parent.parent.parent
BOTH = ("cheetah_run", "cheetah_run_backward")
CLONE = ModelConfig(chunk=1, width=16)  # the cheapest network, where any will do
SMALL = ModelConfig(chunk=8, layers=2, width=16, heads=2, dropout=0.1)


def recorded(run: Path, name: str = "loss") -> dict[int, float]:
    """A metric by step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def stopped_after(monkeypatch, steps: int, config: TrainConfig) -> None:
    """Trains until something kills the process in the middle of the step after."""
    batches = training.batches

    def dies(*args):
        for count, drawn in enumerate(batches(*args)):
            if count == steps:
                raise KeyboardInterrupt
            yield drawn

    with monkeypatch.context() as patch:
        patch.setattr(training, "batches", dies)
        with pytest.raises(KeyboardInterrupt):
            training.train(config)


def saved(config: TrainConfig) -> list[np.ndarray]:
    mesh = make_mesh(config.mesh)
    agent = checkpoint.load(config.run, config, mesh)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(agent.parameters)]


def test_resumed_equals_uninterrupted_bitwise(config, tmp_path, monkeypatch):
    straight = config(
        run=tmp_path / "straight",
        model=SMALL,
        steps=6,
        tasks=BOTH,
        data={"trajectories": 2, "fixed": True},
        checkpoint_every=2,
    )
    training.train(straight)

    broken = dataclasses.replace(straight, run=tmp_path / "broken")
    stopped_after(monkeypatch, 4, broken)
    assert checkpoint.latest(broken.run) == 4
    training.train(broken)
    assert checkpoint.latest(broken.run) == 6
    for left, right in zip(saved(straight), saved(broken), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_run_with_other_settings_is_refused_by_name(config):
    made = config(steps=2, method="bc", model=CLONE)
    training.train(made)
    changed = dataclasses.replace(made, seed=5)
    with pytest.raises(ValueError, match=r"other settings \(seed 0 → 5\)"):
        training.train(changed)


def test_an_incomplete_checkpoint_is_not_one(config):
    made = config(steps=2, method="bc", model=CLONE)
    training.train(made)
    (checkpoint.folder(made.run) / "9").mkdir()
    assert checkpoint.latest(made.run) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "memory"),
    [
        (MeshConfig(), "bpt"),
        (MeshConfig(ring=8), "ring"),
        (MeshConfig(data=2, fsdp=2, tensor=2), "plain"),
    ],
)
def test_a_run_goes_on_alike_on_any_other_mesh(config, tmp_path, monkeypatch, mesh, memory):
    """The next five losses within 1e-6, relative, wherever the first two steps were made."""
    first = config(
        run=tmp_path / "first",
        model=dataclasses.replace(SMALL, width=256),  # wide enough for sharded parameters
        mesh=MeshConfig(data=2, fsdp=1, ring=4),
        tasks=BOTH,
        steps=7,
        learning_rate=1e-3,
        data={"trajectories": 2, "fixed": True, "multiple": 4, "batch_tokens": 88},
        log_every=1,
        checkpoint_every=2,
    )
    stopped_after(monkeypatch, 2, first)
    other = dataclasses.replace(
        first,
        run=tmp_path / "other",
        mesh=mesh,
        model=dataclasses.replace(first.model, memory=memory),
    )
    (tmp_path / "first").rename(other.run)
    training.train(other)
    straight = dataclasses.replace(first, run=tmp_path / "straight")
    training.train(straight)
    found, expected = recorded(other.run), recorded(straight.run)
    assert sorted(found) == sorted(expected) == [1, 2, 3, 4, 5, 6, 7]
    for step in range(3, 8):
        assert found[step] == pytest.approx(expected[step], rel=1e-6), step


def test_a_resumed_run_keeps_its_batches_or_says_why_it_cannot(config):
    """The number of chains is settled when a run begins, not by the mesh it goes on upon."""
    made = config(steps=2, method="bc", model=CLONE, mesh=MeshConfig(data=2))
    training.train(made)
    assert checkpoint.read_config(made.run).data.multiple == 2
    longer = dataclasses.replace(made, mesh=MeshConfig(data=4))
    with pytest.raises(ValueError, match=r"data\.multiple=2 sequences do not divide .* = 4"):
        training.train(longer)


def test_other_episodes_are_refused(config, cheetah_episodes, tmp_path):
    made = config(steps=2, method="bc", model=CLONE)
    training.train(made)
    fewer = pack([cheetah_episodes], tmp_path / "fewer", domain="cheetah", episodes=10)
    data = dataclasses.replace(made.data, store=fewer.path)
    with pytest.raises(ValueError, match=r"was trained on other episodes than those in .*fewer"):
        training.train(dataclasses.replace(made, data=data))
    # Nor are they evaluated on, while the same ones may lie anywhere.
    with pytest.raises(ValueError, match=r"trained on other episodes than those in .*fewer"):
        checkpoint.check_episodes(made.run, 2, fewer)
    moved = Path(shutil.copytree(made.data.store, tmp_path / "moved"))
    checkpoint.check_episodes(made.run, 2, EpisodeStore(moved))


@pytest.mark.parametrize(
    ("module", "name", "value", "message"),
    [
        (checkpoint, "SCHEMA", 99, "has schema 2, .* reads schema 99"),
        (
            checkpoint,
            "observation_layout",
            lambda config: "cheetah: 17 observations, joints first",
            "is of cheetah: 17 observations in dm_control's order.* has .*joints first",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_refused(
    config, monkeypatch, module, name, value, message
):
    made = config(steps=2, method="bc", model=CLONE)
    training.train(made)
    monkeypatch.setattr(module, name, value)
    with pytest.raises(ValueError, match=message):
        training.train(made)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(made.run, made, make_mesh(made.mesh))


def test_another_task_is_refused_by_name(config):
    made = config(steps=2, method="bc", model=CLONE)
    training.train(made)
    data = dataclasses.replace(made.data, tasks=("cheetah_walk",))
    with pytest.raises(ValueError, match=r"data\.tasks \['cheetah_run'\] → \['cheetah_walk'\]"):
        training.train(dataclasses.replace(made, data=data))


def test_the_newest_two_and_the_best_checkpoints_are_kept(config, monkeypatch):
    """Scores are those of the evaluations, here made up so that the first is the best."""
    from agent.validation import Found, Validation

    monkeypatch.setattr(
        Validation, "__call__", lambda self, state, step: Found({"made_up": -step}, -step)
    )
    made = config(steps=8, method="bc", model=CLONE, evaluate_every=1)
    training.train(made)
    assert checkpoint.steps(made.run) == [1, 7, 8]
    assert (checkpoint.best(made.run), checkpoint.latest(made.run)) == (1, 8)
    assert [checkpoint.numbered(made.run, which) for which in ("best", "newest", 7)] == [1, 8, 7]
    mesh = make_mesh(made.mesh)
    assert checkpoint.load(made.run, made, mesh, step=1).step == 1
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 4, only of \[1, 7, 8\]"):
        checkpoint.load(made.run, made, mesh, step=4)


def test_a_run_starts_from_the_parameters_of_another(config, tmp_path):
    first = config(run=tmp_path / "first", steps=3, method="bc", model=CLONE)
    training.train(first)
    second = dataclasses.replace(first, run=tmp_path / "second", start_from=first.run, seed=5)
    state = checkpoint.fresh_state(second, make_mesh(second.mesh))
    assert int(state.step) == 0
    for left, right in zip(jax.tree.leaves(state.parameters), saved(first), strict=True):
        np.testing.assert_array_equal(left, right)
    wider = dataclasses.replace(second, model=dataclasses.replace(CLONE, width=32))
    said = r"start_from=.*first has other parameters: .* is \(16, 6\) there and \(32, 6\) here"
    with pytest.raises(ValueError, match=said):
        checkpoint.fresh_state(wider, make_mesh(wider.mesh))


def started(run: Path, store: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "scripts.train", "tiny", "--run", str(run)]
    command += ["--data.store", str(store), "--data.tasks", "cheetah_run", "--method", "bc"]
    return subprocess.Popen(
        [*command, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(cheetah_store, tmp_path):
    """Bitwise the same parameters and the same records, each step once."""
    flags = ("--optimizer.steps", "4000", "--checkpoint-every", "50", "--log-every", "10")
    broken, straight = tmp_path / "broken", tmp_path / "straight"
    kills = 0
    while kills < 3:
        with started(broken, cheetah_store.path, *flags) as process:
            before = checkpoint.latest(broken) or 0
            while (checkpoint.latest(broken) or 0) <= before and process.poll() is None:
                time.sleep(0.05)
            time.sleep(0.1 * kills)
            assert process.poll() is None, "finished before it could be killed"
            process.kill()
            kills += 1
    for run in (broken, straight):
        with started(run, cheetah_store.path, *flags) as process:
            _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    assert recorded(broken) == recorded(straight)
    lines = (broken / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(10, 4001, 10))
    config = checkpoint.read_config(straight)
    for left, right in zip(
        saved(dataclasses.replace(config, run=broken)), saved(config), strict=True
    ):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_says_so_and_ends_well(cheetah_store, tmp_path, number):
    flags = ("--optimizer.steps", "1000000", "--log-every", "10")
    with started(tmp_path / "run", cheetah_store.path, *flags) as process:
        while not (tmp_path / "run" / "metrics.jsonl").exists() or not recorded(tmp_path / "run"):
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.1)
        process.send_signal(number)
        said, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    step = checkpoint.latest(tmp_path / "run")
    assert f"stopped by a signal after step {step} of 1000000, which is saved" in errors
    assert f"stopped after step {step} of 1000000: " in said and "trained" not in said
    assert max(recorded(tmp_path / "run")) == step
