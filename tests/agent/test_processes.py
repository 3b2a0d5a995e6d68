"""Several processes are one run: the same losses, one writer, one end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from agent import checkpoint, processes, results

ROOT = Path(__file__).parent.parent.parent


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start(run: Path, store: Path, count: int, *flags: str) -> list[subprocess.Popen[str]]:
    """`scripts.train` as `count` processes."""
    command = ["-m", "scripts.train", "tiny", "--run", str(run)]
    command += ["--data.store", str(store), "--data.tasks", "cheetah_run"]
    command += ["--mesh.data", "2", "--mesh.ring", "4", "--log-every", "1", *flags]
    return launch(command, count)


def launch(command: list[str], count: int) -> list[subprocess.Popen[str]]:
    """Python as `count` processes that share eight devices out among themselves."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(8 // count)}
    port = free_port()
    if count > 1:
        environment |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(count),
        }
    return [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment | ({"JAX_PROCESS_ID": str(process)} if count > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(count)
    ]


def finish(started: list[subprocess.Popen[str]], seconds: float = 300) -> list[tuple[int, str]]:
    """Exit status and standard error of every process."""
    try:
        errors = [process.communicate(timeout=seconds)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, errors, strict=True)]


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.slow
def test_two_processes_are_one_run_and_go_on_as_one_or_two(cheetah_store, tmp_path):
    """The first five losses of 2 × 4 devices are those of 1 × 8; either goes on as the other."""
    flags = ("--optimizer.steps", "10", "--checkpoint-every", "5", "--data.fixed")
    flags += ("--evaluate-every", "5")
    found = {}
    for count in (1, 2):
        run = tmp_path / f"of{count}"
        ended = finish(start(run, cheetah_store.path, count, *flags))
        assert [status for status, _ in ended] == [0] * count, ended
        assert checkpoint.steps(run) == [5, 10]
        found[count] = losses(run)
        assert "step 10/10" in ended[0][1]
        if count == 2:
            assert "2 processes" in ended[0][1]
            assert "step" not in ended[1][1]  # the first process alone writes and speaks
    assert len(list((tmp_path / "of2").glob("events.*"))) == 1
    assert sorted(found[1]) == sorted(found[2]) == list(range(1, 11))
    for step in range(1, 6):
        assert found[2][step] == pytest.approx(found[1][step], rel=1e-6), step

    # From one process to two, and back.
    for count, run in ((2, tmp_path / "of1"), (1, tmp_path / "of2")):
        (run / "checkpoints" / "10").rename(run / "10")
        ended = finish(start(run, cheetah_store.path, count, *flags))
        assert [status for status, _ in ended] == [0] * count, ended
        again = losses(run)
        for step in range(6, 11):
            assert again[step] == pytest.approx(found[3 - count][step], rel=1e-6), step

    # Rollouts too: the first process steps the environments, and all act on what it saw.
    returns = {}
    for count in (1, 2):
        out = tmp_path / f"evaluation{count}"
        command = ["-m", "scripts.evaluate", "--checkpoint", str(tmp_path / "of1")]
        command += ["--chains", "2", "--out", str(out), "--no-plots"]
        ended = finish(launch(command, count))
        assert [status for status, _ in ended] == [0] * count, ended
        returns[count] = [each.episode_return for each in results.read_csv(out / "results.csv")]
    assert len(returns[1]) == 2 * 4
    assert returns[2] == pytest.approx(returns[1], rel=0.05, abs=0.05)


ACTING = """
import sys
import jax
from agent import policy, processes
sys.path.insert(0, "tests/agent")
import test_policy as steps
from agent.config import DataConfig, MeshConfig, ModelConfig, TrainConfig
from pathlib import Path
import numpy as np

processes.join()
config = TrainConfig(
    run=Path("unused"),
    data=DataConfig(store=Path("unused"), tasks=("cheetah_run",)),
    model=ModelConfig(packing=sys.argv[1], chunk=1, layers=2, width=16, heads=2, block_size=8),
    mesh=MeshConfig(data=2, ring=4),
)
agent = steps.agent_of(config)
whole = steps.random_steps(2, 20, 5, 6, seed=0)
acting = policy.ChainPolicy(agent, batch=2, steps=10)
acting.remember(steps.part(whole, slice(0, 10)))
actions = []
for step in range(10, 20):
    now = steps.part(whole, slice(step, step + 1))
    actions.append(acting.act(now))
    acting.record(now)
if processes.is_first():
    np.save(sys.argv[2], np.stack(actions))
"""


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["step", "rsar"])
def test_a_cache_sharded_over_two_processes_acts_like_that_of_one(tmp_path, packing):
    """Across a prefix and two episodes; that of one equals the full forward (test_policy.py)."""
    for count in (1, 2):
        out = str(tmp_path / f"{count}.npy")
        ended = finish(launch(["-c", ACTING, packing, out], count))
        assert [status for status, _ in ended] == [0] * count, ended
    one, two = (np.load(tmp_path / f"{count}.npy") for count in (1, 2))
    assert one.shape == (10, 2, 6)
    np.testing.assert_allclose(two, one, atol=1e-5)


def wait_for_a_step(run: Path, started: list[subprocess.Popen[str]]) -> None:
    while not (run / "metrics.jsonl").exists() or not losses(run):
        assert all(process.poll() is None for process in started), finish(started)
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_process_stops_all_at_the_same_step(cheetah_store, tmp_path, number):
    run = tmp_path / "run"
    started = start(run, cheetah_store.path, 2, "--optimizer.steps", "1000000", "--data.fixed")
    wait_for_a_step(run, started)
    started[1].send_signal(number)
    ended = finish(started)
    assert [status for status, _ in ended] == [0, 0], ended
    assert f"stopped by a signal after step {checkpoint.latest(run)} of" in ended[0][1]


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others_with_a_clear_message(cheetah_store, tmp_path):
    run = tmp_path / "run"
    started = start(run, cheetah_store.path, 2, "--optimizer.steps", "1000000", "--data.fixed")
    wait_for_a_step(run, started)
    started[1].kill()
    [(status, errors), _] = finish(started, 200)
    assert status not in (0, None)
    assert "another process of the run is gone" in errors
    assert "Start all of them again to resume" in errors


def test_an_incomplete_description_of_the_processes_is_refused(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    with pytest.raises(ValueError, match="JAX_COORDINATOR_ADDRESS must be set as well"):
        processes.join()


@pytest.mark.parametrize("name", ["JAX_NUM_PROCESSES", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_one_process_joins_nobody(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    processes.join()  # would raise, since JAX has been used already
