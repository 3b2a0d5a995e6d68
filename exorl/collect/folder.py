"""The folder of a collection: what it holds, and whether it may be added to."""

import importlib.metadata
import json
from dataclasses import asdict
from pathlib import Path

from exorl.collect.config import CollectConfig
from exorl.episodes import find
from exorl.paths import write_whole

DESCRIPTION = "collector.json"


def claim(config: CollectConfig) -> None:
    """Makes the folder, or sees that the episodes in it are of the same collection.

    `steps` and `processes` may differ: they don't change what is in an episode.

    Raises:
        FileExistsError: The folder holds something else.
    """
    path = config.folder / DESCRIPTION
    wanted = _identity(config)
    if path.exists():
        _compare(path, json.loads(path.read_text()), wanted)
        return
    if config.folder.is_dir() and find(config.folder):
        raise FileExistsError(
            f"{config.folder} holds episodes but no {DESCRIPTION} that says where they are from; "
            "choose another folder"
        )
    config.folder.mkdir(parents=True, exist_ok=True)
    packages = ("exoring", "numpy", "mujoco", "dm-control", "jax", "jaxlib")
    versions = {name: importlib.metadata.version(name) for name in packages}
    text = json.dumps(wanted | {"versions": versions}, indent=2) + "\n"
    write_whole(path, text.encode())


def missing(folder: Path, episodes: int) -> list[int]:
    """Which of the first `episodes` episodes are not in the folder yet."""
    present = {file.index for file in find(folder)}
    return [index for index in range(episodes) if index not in present]


def _identity(config: CollectConfig) -> dict:
    """The settings that decide what is in an episode."""
    identity = {"task": config.task, "method": config.method, "seed": config.seed}
    if config.method == "supervised":
        identity |= {f"learner.{name}": value for name, value in asdict(config.learner).items()}
    return identity


def _compare(path: Path, found: dict, wanted: dict) -> None:
    for name, value in wanted.items():
        if found.get(name) != value:
            raise FileExistsError(
                f"{path}: the episodes there were collected with {name} = {found.get(name)}, "
                f"now {value} is asked for; choose another folder, or remove this one"
            )
