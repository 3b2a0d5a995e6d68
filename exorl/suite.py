"""dm_control's own environments: imported late, checked for a MuJoCo that fits, and quiet."""

import importlib.metadata
import logging
import math
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from exorl.domains import DOMAINS
from exorl.tasks import task as find_task

if TYPE_CHECKING:
    from dm_control.rl.control import Environment


class VersionError(RuntimeError):
    """The installed dm_control and MuJoCo do not work together."""


def load(task: str, seed: int) -> "Environment":
    """dm_control's environment of a task, its random state `RandomState(seed)`.

    Without `MUJOCO_GL` in the environment, dm_control is imported without rendering, which needs
    neither display nor GL libraries: set it to `egl` or `osmesa` beforehand to render.

    Raises:
        TaskError: There is no such task.
        VersionError: dm_control can't read this MuJoCo's models.
    """
    spec = find_task(task)
    _check_versions()
    os.environ.setdefault("MUJOCO_GL", "disabled")
    from dm_control import suite

    try:
        logging.getLogger("absl").addFilter(_EXPECTED)
        # Importing `dm_control.composer` switches on all deprecation warnings, of which MuJoCo's
        # bindings cause several a step.
        with warnings.catch_warnings():
            if (spec.domain, spec.goal) not in suite.ALL_TASKS:
                return DOMAINS[spec.domain].environment(spec.goal, seed)
            return suite.load(spec.domain, spec.goal, task_kwargs={"random": seed})
    except AttributeError as error:
        if "MjModel" in str(error) or "MjData" in str(error):
            raise VersionError(_versions_message()) from error
        raise


def reseed(environment: "Environment", seed: int) -> None:
    """Makes the next episode the one that `load(task, seed)` begins with."""
    # Manipulation environments hold the random state themselves, the suite's in their task.
    random = getattr(environment, "random_state", None) or environment.task.random
    random.seed(seed)


def scaling(minimum: np.ndarray, maximum: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """What turns actions `[..., A]` in [-1, 1], clipped to it, into controls `[..., A]`.

    The controls are in [minimum, maximum]. `ValueError` if an action is NaN or infinite, which
    MuJoCo would take for zero.
    """
    centre, half = (maximum + minimum) / 2, (maximum - minimum) / 2
    as_it_is = (minimum == -1).all() and (maximum == 1).all()
    highest = np.ones(len(centre), np.float32)
    lowest = -highest

    def scale(action: np.ndarray) -> np.ndarray:
        # This runs at every step: NumPy's own clip and isfinite would take most of its time.
        if not math.isfinite(np.vdot(action, action)) and not np.isfinite(action).all():
            raise ValueError(f"actions must be finite, got {action}")
        clipped = np.minimum(np.maximum(action, lowest), highest)
        return clipped if as_it_is else centre + half * clipped

    return scale


def _check_versions() -> None:
    if int(importlib.metadata.version("mujoco").split(".")[0]) >= 4:
        raise VersionError(_versions_message())


def _versions_message() -> str:
    versions = (importlib.metadata.version(name) for name in ("dm-control", "mujoco"))
    return (
        "dm_control {} does not work with mujoco {}: it reads model fields that this MuJoCo "
        'lacks. Mend it by: pip install "mujoco>=3.17,<4"'.format(*versions)
    )


class _Expected(logging.Filter):
    """Drops the two warnings that are logged when all is well, and nothing else.

    Every load of cheetah.xml logs the one; the other tells of an attempt at a start of jaco's
    arm that dm_control gives up for another.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "'settotalmass' is deprecated" not in text and "Failed to converge" not in text


_EXPECTED = _Expected()
