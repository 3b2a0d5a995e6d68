"""Draw episodes that `scripts.evaluate --video` kept, as GIFs beside them.

Drawing needs EGL or OSMesa (`MUJOCO_GL=osmesa`), no display; a machine without can keep the
episodes and leave the drawing to another.

Example:
    python -m scripts.render runs/demo/seed0/hidden/evaluation/videos/*.npz
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from scripts import command


@dataclass(frozen=True)
class Render:
    """Draw episodes.

    Attributes:
        episodes: files with `task`, `seed` and `actions` [T, A].
        height: in pixels.
        width: in pixels.
        seconds: that each video takes.
    """

    episodes: tyro.conf.Positional[tuple[Path, ...]]
    height: int = 240
    width: int = 320
    seconds: float = 10.0


def main(args: Render) -> None:
    """Draw all, one after the other."""
    from exorl import render

    for path in args.episodes:
        task, seed, actions = _read(path)
        pictures = render.frames(task, seed, actions, (args.height, args.width))
        render.save_gif(path.with_suffix(".gif"), pictures, args.seconds)
        print(path.with_suffix(".gif"))


def _read(path: Path) -> tuple[str, int, np.ndarray]:
    """Task, seed and actions ``[T, A]`` of a kept episode; `ValueError` if it is none."""
    try:
        with np.load(path) as episode:
            return str(episode["task"]), int(episode["seed"]), episode["actions"]
    except (KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path}: not an episode that scripts.evaluate --video kept, with task, seed and "
            f"actions ({error})"
        ) from error


if __name__ == "__main__":
    command.run(lambda: main(tyro.cli(Render, description=__doc__)))
