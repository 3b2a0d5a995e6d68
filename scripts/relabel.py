"""Recompute a task's rewards for every episode of a store, and show what the episodes score.

Example:
    python -m scripts.relabel --store ~/.cache/exoring/stores/cheetah \
        --tasks cheetah_run cheetah_run_backward
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from exorl import EpisodeStore, domain_tasks, relabel
from scripts import command


@dataclass(frozen=True)
class Relabel:
    """Recompute a task's rewards for every episode of a store.

    Attributes:
        store: folder of a packed store.
        tasks: which tasks; by default all of the store's domain.
        mode: `exact` rewards, or `exorl`, which ignores the cost of control as upstream does.
        backend: `closed_form` formulas, or, to check them, `mujoco` or `dm_control` itself.
    """

    store: Path
    tasks: tuple[str, ...] = ()
    mode: relabel.Mode = "exact"
    backend: relabel.Backend = "closed_form"


def main(args: Relabel) -> None:
    """Relabel, and print quantiles of the returns."""
    store = EpisodeStore(args.store)
    tasks = args.tasks or tuple(task.name for task in domain_tasks(store.domain))
    print(f"{len(store)} episodes in {store.path}, returns of {args.mode} rewards")
    print(f"{'task':<24}{'min':>9}{'median':>9}{'90 %':>9}{'max':>9}")
    for task in tasks:
        returns = relabel.returns(store, task, args.mode, args.backend)
        quantiles = np.quantile(returns, [0, 0.5, 0.9, 1])
        print(f"{task:<24}" + "".join(f"{value:9.1f}" for value in quantiles))


if __name__ == "__main__":
    command.run(lambda: main(tyro.cli(Relabel, description=__doc__)))
