"""dm_control's own environments: imported late, checked for a MuJoCo that fits, and quiet."""

import contextlib
import importlib.metadata
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from exorl.domains import cheetah, walker
from exorl.tasks import task as find_task

if TYPE_CHECKING:
    from dm_control.rl.control import Environment


class VersionError(RuntimeError):
    """The installed dm_control and MuJoCo do not work together."""


# Domains with tasks that dm_control lacks.
_OURS = {"cheetah": cheetah, "walker": walker}


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
        with _quiet():
            if (spec.domain, spec.goal) not in suite.ALL_TASKS:
                return _OURS[spec.domain].environment(spec.goal, seed)
            return suite.load(spec.domain, spec.goal, task_kwargs={"random": seed})
    except AttributeError as error:
        if "MjModel" in str(error) or "MjData" in str(error):
            raise VersionError(_versions_message()) from error
        raise


def scale(action: np.ndarray, minimum: np.ndarray, maximum: np.ndarray) -> np.ndarray:
    """Controls `[..., A]` float64 in [minimum, maximum] from actions in [-1, 1], clipped to it.

    Raises:
        ValueError: An action is NaN or infinite, which MuJoCo would take for zero.
    """
    if not np.isfinite(action).all():
        raise ValueError(f"actions must be finite, got {action}")
    # Exactly the action itself where the range is [-1, 1] already.
    centre, half = (maximum + minimum) / 2, (maximum - minimum) / 2
    return centre + half * np.clip(action, -1, 1).astype(np.float64)


def _check_versions() -> None:
    if int(importlib.metadata.version("mujoco").split(".")[0]) >= 4:
        raise VersionError(_versions_message())


def _versions_message() -> str:
    versions = (importlib.metadata.version(name) for name in ("dm-control", "mujoco"))
    return (
        "dm_control {} does not work with mujoco {}: it reads model fields that this MuJoCo "
        'lacks. Mend it by: pip install "mujoco>=3.17,<4"'.format(*versions)
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops the one warning that every load of cheetah.xml logs, and nothing else."""

    def keep(record: logging.LogRecord) -> bool:
        return "'settotalmass' is deprecated" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
