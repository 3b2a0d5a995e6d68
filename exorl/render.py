"""Episodes as moving pictures: actions played again from the same initial state, and drawn."""

import contextlib
import importlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from exorl import suite
from exorl.paths import write_whole
from exorl.tasks import task as find_task

EVERY = 8
"""One frame is drawn of as many steps."""


class RenderError(RuntimeError):
    """Nothing can be drawn here, or not written; the message says what is missing."""


def frames(task: str, seed: int, actions: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Pictures of every `EVERY`-th step of an episode.

    Args:
        task: whose environment is drawn.
        seed: of the initial state, as `exorl.Simulation.reset` takes it.
        actions: ``[T, A]`` in [−1, 1], from the first step on.
        size: height and width in pixels.

    Returns:
        ``[F, height, width, 3]`` uint8.

    Raises:
        RenderError: MuJoCo cannot draw here, or not so large.
        TaskError: There is no such task.
        ValueError: The actions have another shape.
        VersionError: dm_control can't read this MuJoCo's models.
    """
    spec, actions = find_task(task), np.asarray(actions, np.float32)
    if actions.ndim != 2 or not len(actions) or actions.shape[1] != spec.action_dim:
        raise ValueError(
            f"actions of {task} have shape {actions.shape}, expected (T, {spec.action_dim}), T > 0"
        )
    os.environ.setdefault("MUJOCO_GL", "egl")  # before dm_control is imported
    with _drawing():
        importlib.import_module("dm_control.mujoco")  # looks for the library that draws
    environment = suite.load(task, seed)
    environment.reset()
    model = environment.physics.model
    most = (model.vis.global_.offheight, model.vis.global_.offwidth)
    if size[0] > most[0] or size[1] > most[1]:
        raise RenderError(f"{task}: pictures of {size} pixels, expected at most {most}")
    scale = suite.scaling(*model.ptr.actuator_ctrlrange.T)
    camera = 0 if model.ncam else -1
    drawn = []
    for step, action in enumerate(actions):
        if step % EVERY == 0:
            with _drawing():
                drawn.append(environment.physics.render(*size, camera_id=camera))
        environment.step(scale(action))
    return np.stack(drawn)


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    """Says by `RenderError` that MuJoCo cannot draw, and what to install."""
    try:
        yield
    except (ImportError, AttributeError, RuntimeError) as error:
        raise RenderError(
            f"MuJoCo cannot draw with MUJOCO_GL={os.environ['MUJOCO_GL']} ({error}); install EGL "
            f"(libegl1) or set MUJOCO_GL=osmesa with libosmesa6"
        ) from error


def save_gif(path: Path, pictures: np.ndarray, seconds: float) -> None:
    """Write ``[F, height, width, 3]`` uint8 as a GIF that loops and takes so many seconds.

    Raises:
        RenderError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise RenderError('videos need Pillow: pip install "exoring[plots]"') from error
    images = [Image.fromarray(picture) for picture in pictures]
    written = io.BytesIO()
    images[0].save(
        written,
        format="GIF",
        save_all=True,
        append_images=images[1:],
        duration=max(20, round(1000 * seconds / len(images))),
        loop=0,
    )
    write_whole(path, written.getvalue())
