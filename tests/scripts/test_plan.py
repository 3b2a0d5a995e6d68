"""The planner's command line: what it prints, its exit status, its errors for people."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from agent import checkpoint
from agent.config import DataConfig, MeshConfig, ModelConfig, TrainConfig
from ring import targets
from scripts import apart, plan

ROOT = Path(__file__).parent.parent.parent
SMALL = "--model.chunk 100 --model.layers 1 --model.width 16 --model.block-size 5".split()


def test_a_preset_that_fits(capsys):
    status = plan.report(["tiny", "--target", "cpu:8", *SMALL, "--explain"])
    out = capsys.readouterr().out
    assert status == 0 and "\nFITS" in out
    assert "ring 8 × tensor 1, chosen to fill the target" in out
    assert "jaxlib" in out and "collective-permute" in out
    assert "agent/model.py:" in out


def test_one_that_does_not_fit_and_what_to_change(capsys, monkeypatch):
    monkeypatch.setattr("agent.plan.available", lambda target: 10**8)
    options = "--model.memory plain --model.chunk 10 --data.trajectories 64 --suggestions 1"
    options += " --model.layers 1 --model.width 16 --model.block-size 640"
    status = plan.report(["tiny", "--target", "cpu:1", *options.split()])
    out = capsys.readouterr().out
    assert status == plan.OOM == 1 and "\nOOM" in out
    assert "\nFITS" in out.partition("changes, each compiled")[2]


def test_a_run_by_its_folder(tmp_path, capsys):
    """The settings of the run, on its own mesh."""
    data = DataConfig(store=tmp_path, tasks=("cheetah_run",))
    small = ModelConfig(chunk=100, layers=1, width=16)
    made = TrainConfig(tmp_path / "run", data, model=small, mesh=MeshConfig(data=2)).resolved()
    checkpoint.write_config(made)
    arguments = [str(made.run), "--target", "cpu:2"]
    request = plan.parse(arguments)
    assert request.config == made and request.target == "cpu:2"
    other = plan.parse([*arguments, "--task", "walker_run"]).config
    assert other.data == dataclasses.replace(data, tasks=("walker_run",), multiple=2)
    assert capsys.readouterr().out == ""
    assert plan.report(arguments) == 0
    assert "mesh        data 2 × fsdp 1 × ring 1 × tensor 1\n" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{}", "{", '{"data": {}, "start_from": null}'])
def test_a_run_whose_settings_cannot_be_read(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is not what training writes"):
        plan.parse([str(tmp_path), "--target", "cpu:1"])


def test_behaviour_cloning_has_no_sequence(capsys):
    assert plan.report(["bc", "--target", "cpu:1", "--data.batch-tokens", "64"]) == 0
    out = capsys.readouterr().out
    assert "batch       64 steps\n" in out and "tokens of a sequence" not in out


def test_a_mesh_that_is_given_is_kept():
    """Even if it is the preset's own."""
    options = ["at_ring_128", "--target", "cpu:16"]
    assert plan.meant(options, plan.parse(options)).mesh == MeshConfig(ring=16)
    options += ["--mesh.ring", "8"]
    assert plan.meant(options, plan.parse(options)).mesh == MeshConfig(ring=8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "--target", "h200"], "name a number of devices, such as h200:8"),
        (["tiny", "--target", "cpu:8", "--mesh.ring", "3"], "has 3 devices, cpu:8 has 8"),
        (["tiny", "--target", "cpu:8", "--model.heads", "3"], "must be a multiple of 4 channels"),
        (["at_small_128", "--target", "cpu:4", "--data.trajectories", "0"], "trajectories=0 must"),
        (["at_small_128", "--target", "cpu:4", "--model.chunk", "0"], "chunk=0 must be positive"),
        (["tiny", "--target", "cpu:8", "--efficiency", "35"], "no fraction of a peak"),
        (["tiny", "--target", "cpu:8", "--suggestions", "-1"], "must not be negative"),
        (["bc", "--target", "cpu:1", "--model.dtype", "bfloat16"], "computes in float32"),
        (["nowhere", "--target", "cpu:8"], "nowhere is neither a preset .*at_ring_128"),
    ],
)
def test_impossible_requests(arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        plan.report(arguments)


def test_a_missing_compiler_is_one_line():
    if targets.installed("tpu"):
        pytest.skip("plan-tpu is here")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.plan", "tiny", "--target", "v5e:2x4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("exoring: error: v5e:2x4 has no compiler here: pip install")
    assert len(done.stderr.splitlines()) == 1


def test_a_compiler_that_is_aborted_is_explained(monkeypatch):
    monkeypatch.setattr(apart, "run", lambda *_: -6)
    with pytest.raises(ValueError, match=r"\(libtpu .*ended by SIGABRT while .* for v4:1x2x2: "):
        plan.main(["tiny", "--target", "v4:1x2x2"])
