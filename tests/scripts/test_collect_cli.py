"""`python -m scripts.collect`, and how command lines report errors."""

import errno
import os
import subprocess
import sys

import pytest

from exorl.tasks import TaskError
from scripts import command


def run_collect(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "scripts.collect", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def test_it_collects_says_what_and_resumes(tmp_path):
    arguments = ["--task", "cartpole_swingup", "--method", "random", "--steps"]
    first = run_collect(*arguments, "1000", EXORING_HOME=str(tmp_path))
    assert first.returncode == 0, first.stderr
    folder = tmp_path / "episodes" / "cartpole_swingup" / "random"
    assert (folder / "episode_000000_1000.npz").exists()
    assert "1 episodes, 1,000 steps" in first.stdout
    assert "returns of cartpole_swingup: min " in first.stdout
    assert first.stdout.splitlines()[-1] == str(folder)
    assert len(first.stderr.splitlines()) == 1  # the log line: no progress bar, no warning
    assert first.stderr.startswith("exoring: cartpole_swingup, random, seed 0: 1 episodes made")

    refused = run_collect(*arguments, "1000", "--seed", "1", EXORING_HOME=str(tmp_path))
    assert refused.returncode == 2
    assert refused.stderr.startswith("exoring: error: ")
    assert "seed = 0" in refused.stderr
    assert "Traceback" not in refused.stderr


def fails_with(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    "error",
    [
        TaskError("unknown task"),
        FileNotFoundError("no such"),
        FileExistsError("in the way"),
        NotADirectoryError(errno.ENOTDIR, "Not a directory", "file/out"),
        PermissionError(errno.EACCES, "Permission denied", "out"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_mistakes_of_the_user_are_one_line(capsys, error):
    with pytest.raises(SystemExit) as exit:
        command.run(fails_with(error))
    assert exit.value.code == 2
    assert capsys.readouterr().err == f"exoring: error: {error}\n"


@pytest.mark.parametrize("kind", ["ValueError", "FloatingPointError"])
def test_builtin_errors_are_the_users_if_our_code_raises_them(capsys, kind):
    ours = {"__name__": "agent.interval"}
    exec(f"def main():\n    raise {kind}('no longer finite')", ours)
    with pytest.raises(SystemExit):
        command.run(ours["main"])
    assert capsys.readouterr().err == "exoring: error: no longer finite\n"


@pytest.mark.parametrize(
    "error",
    [
        # From elsewhere, here this test, these say nothing to the user.
        ValueError("shapes do not match"),
        FloatingPointError("divide by zero"),
        KeyError("lost"),
        RuntimeError("broken"),
        OSError(errno.EIO, "Input/output error"),
    ],
    ids=repr,
)
def test_faults_of_the_program_show_their_traceback(error):
    with pytest.raises(type(error)):
        command.run(fails_with(error))


def test_debugging_shows_every_traceback(monkeypatch):
    monkeypatch.setenv("EXORING_DEBUG", "1")
    with pytest.raises(TaskError):
        command.run(fails_with(TaskError("unknown task")))


def test_an_interruption_ends_quietly(capsys):
    with pytest.raises(SystemExit) as exit:
        command.run(fails_with(KeyboardInterrupt()))
    assert exit.value.code == 130
    assert capsys.readouterr().err == ""
