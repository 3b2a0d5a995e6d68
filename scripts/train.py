"""Train an agent from a preset; run the same command again to resume.

SIGTERM and Ctrl-C save before they end the run. `docs/scaling.md` tells how to use several GPUs,
TPUs and hosts; `scripts/train_<task>.py` know their task's data already.

Example:
    python -m scripts.train demo --run runs/cheetah --data.store ~/.cache/exoring/stores/cheetah \
        --data.tasks cheetah_run
"""

from pathlib import Path

import tyro

from agent.config import TrainConfig
from agent.presets import PRESETS
from exorl import home
from exorl import task as task_of
from scripts import command


def parse(
    arguments: list[str] | None = None, task: str | None = None, description: str | None = __doc__
) -> TrainConfig:
    """The config that a command line asks for.

    Args:
        arguments: by default those of this process.
        task: whose store and runs are the defaults; without one they must be given.
        description: what the help begins with.
    """
    choices = {name: (preset.description, defaults(name, task)) for name, preset in PRESETS.items()}
    return tyro.extras.overridable_config_cli(choices, description=description, args=arguments)


def defaults(preset: str, task: str | None = None) -> TrainConfig:
    """A preset's config, as one task uses it."""
    if task is None:
        return PRESETS[preset].config(
            run=Path("runs") / preset, store=tyro.MISSING, tasks=tyro.MISSING
        )
    store = home() / "stores" / f"{task_of(task).domain}-exorl8"
    return PRESETS[preset].config(run=Path("runs") / task / preset, store=store, tasks=(task,))


def main(config: TrainConfig) -> None:
    """Train, and say where the run lies and whether it is done."""
    from agent import checkpoint  # after the command line is known to be sound
    from agent.training import train

    run, last = train(config), config.optimizer.steps
    step = checkpoint.latest(run)
    print(f"trained: {run}" if step == last else f"stopped after step {step} of {last}: {run}")


def train_task(task: str, description: str | None) -> None:
    """The command line of one task's script."""
    command.run(lambda: main(parse(task=task, description=description)))


if __name__ == "__main__":
    command.run(lambda: main(parse()))
