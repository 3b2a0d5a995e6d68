"""Roll a trained agent out in dm_control and print what it earns, with intervals.

Example:
    python -m scripts.evaluate --checkpoint runs/demo/seed0/hidden
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from agent.config import Memory
from agent.evaluation import Context
from scripts import command


@dataclass(frozen=True)
class Evaluate:
    """Roll a trained agent out in dm_control.

    Attributes:
        checkpoint: folder of a training run.
        step: of the checkpoint: the newest, the best of those made by evaluations, or a number.
        contexts: what precedes the own episodes: `self` nothing (n episodes in a row), `dataset`
            n − 1 held-out episodes, `wrong_task` the same under another task. By default all
            that tell something about the agent.
        rollouts: chains for each task and context.
        seed: of initial states and drawn contexts.
        target: return-to-go at the start, over the best-quantile return of the training data.
        memory: act on one device with this memory mode instead of the run's own mesh.
        out: CSV of episode returns; by default evaluation.csv in the run.
    """

    checkpoint: Path
    step: int | Literal["newest", "best"] = "newest"
    contexts: tuple[Context, ...] = ()
    rollouts: int = 20
    seed: int = 0
    target: float = 1.0
    memory: Memory | None = None
    out: Path | None = None


def main(args: Evaluate) -> None:
    """Evaluate, print the table, and save every episode's return."""
    from agent import checkpoint, evaluation, report
    from agent.config import MeshConfig
    from agent.sharding import make_mesh
    from data import Pool
    from exorl import EpisodeStore

    config = checkpoint.read_config(args.checkpoint)
    if args.memory:
        model = dataclasses.replace(config.model, memory=args.memory)
        config = dataclasses.replace(config, model=model, mesh=MeshConfig())
    step = checkpoint.numbered(args.checkpoint, args.step)
    agent = checkpoint.load(args.checkpoint, config, make_mesh(config.mesh), step)
    pool = Pool.load(EpisodeStore(config.data.store), config.data.tasks, config.data.holdout)
    results = evaluation.evaluate(
        agent,
        pool,
        contexts=args.contexts or evaluation.contexts_of(agent),
        rollouts=args.rollouts,
        seed=args.seed,
        target=args.target,
    )
    out = args.out or args.checkpoint / "evaluation.csv"
    evaluation.write_csv(out, results)
    print(report.evaluation_table(results))
    print(f"\nevery episode's return: {out}")


if __name__ == "__main__":
    command.run(lambda: main(tyro.cli(Evaluate, description=__doc__)))
