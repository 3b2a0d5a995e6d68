"""Refusals only: MUJOCO_GL is disabled here, and `scripts.evaluate --video` is tested elsewhere."""

import numpy as np
import pytest

from exorl import render
from exorl.render import RenderError
from exorl.tasks import TaskError
from scripts.render import Render, main

ACTIONS = np.zeros((9, 6), np.float32)
SIZE = (24, 32)


def test_where_nothing_can_be_drawn_it_says_what_to_install():
    with pytest.raises(RenderError, match=r"MUJOCO_GL=disabled \(No OpenGL.*install EGL"):
        render.frames("cheetah_run", 0, ACTIONS, SIZE)


@pytest.mark.parametrize(
    ("changes", "error", "fault"),
    [
        ({"task": "cheetah_runn"}, TaskError, "unknown task"),
        ({"actions": ACTIONS[:, :5]}, ValueError, r"shape \(9, 5\), expected \(T, 6\)"),
        ({"actions": ACTIONS[:0]}, ValueError, r"shape \(0, 6\), expected"),
        ({"actions": ACTIONS[0]}, ValueError, r"shape \(6,\), expected"),
        ({"size": (24, 9999)}, RenderError, r"\(24, 9999\) pixels, expected at most \(480, 640\)"),
    ],
)
def test_other_faults_are_not_taken_for_those_of_drawing(changes, error, fault):
    arguments = {"task": "cheetah_run", "seed": 0, "actions": ACTIONS, "size": SIZE} | changes
    with pytest.raises(error, match=fault):
        render.frames(**arguments)


def test_files_that_are_no_kept_episodes_are_named(tmp_path):
    np.savez(tmp_path / "other.npz", seed=0, actions=ACTIONS)
    np.save(tmp_path / "array.npy", ACTIONS)
    (tmp_path / "nonsense.npz").write_bytes(b"PKnonsense")
    (tmp_path / "empty.npz").touch()
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=rf"{path.name}: not an episode that scripts.evaluate"):
            main(Render((path,)))
    with pytest.raises(FileNotFoundError):
        main(Render((tmp_path / "none.npz",)))
