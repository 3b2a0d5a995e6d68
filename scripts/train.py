"""Train an agent from a preset; run the same command again to resume.

Example:
    python -m scripts.train demo --run runs/cheetah --data.store ~/.cache/exoring/stores/cheetah \
        --data.tasks cheetah_run
"""

from pathlib import Path

import tyro

from agent.config import TrainConfig
from agent.presets import PRESETS
from scripts import command


def parse(arguments: list[str] | None = None) -> TrainConfig:
    """The config that the command line asks for."""
    choices = {
        name: (
            preset.description,
            preset.config(
                run=Path("runs") / name,
                store=tyro.MISSING,
                tasks=tyro.MISSING,
            ),
        )
        for name, preset in PRESETS.items()
    }
    return tyro.extras.overridable_config_cli(choices, description=__doc__, args=arguments)


def main(config: TrainConfig) -> None:
    """Train, and say where the run lies."""
    from agent.training import train  # after the command line is known to be sound

    print(f"trained: {train(config)}")


if __name__ == "__main__":
    command.run(lambda: main(parse()))
