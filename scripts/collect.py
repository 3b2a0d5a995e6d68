"""Collect ExoRL episodes in dm_control; run the same command again to resume.

Example:
    taskset -c 0 python -m scripts.collect --task cheetah_run --method supervised --steps 120000

takes about a minute and a half and reaches returns of 300 to 500 of 1000 (bound to one core: two
threads cost such small networks twice the work for nothing). In the same domain,
`--method structured --steps 200000` takes seconds and reaches 100 to 200.
"""

import time

import numpy as np
import tyro

from exorl import episodes
from exorl.collect import CollectConfig, collect
from scripts import command


def main(config: CollectConfig) -> None:
    """Collect, and say what lies there now and what it scores."""
    started = time.perf_counter()
    folder = collect(config)
    seconds = time.perf_counter() - started
    files = episodes.find(folder)
    returns = [episodes.read(file.path).reward.sum() for file in files]
    low, median, high, best = np.quantile(returns, [0, 0.5, 0.9, 1])
    print(f"{len(files)} episodes, {sum(file.length for file in files):,} steps, {seconds:.1f} s")
    print(
        f"returns of {config.task}: "
        f"min {low:.1f}, median {median:.1f}, 90 % {high:.1f}, max {best:.1f}"
    )
    print(folder)


if __name__ == "__main__":
    command.run(lambda: main(tyro.cli(CollectConfig, description=__doc__)))
