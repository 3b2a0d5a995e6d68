"""Check a dataset before learning from it, and name the task that its rewards were recorded for.

Exit status 0: sound, though there may be warnings; 1: a check failed; 2: nothing could be checked.

Example:
    python -m scripts.verify ~/.cache/exoring/datasets/walker/proto --episodes 200
    python -m scripts.verify ~/.cache/exoring/stores/cheetah --json
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from tqdm import tqdm

from exorl.verify import Report, verify
from scripts import command


@dataclass(frozen=True)
class Verify:
    """Check a dataset before learning from it.

    Attributes:
        data: folder or zip of episodes, or a packed store.
        domain: such as walker; by default the one whose sizes the episodes have.
        episodes: recompute observations, physics and rewards in only so many, evenly spread; all
            else is checked in every episode.
        json: print the report as JSON.
    """

    data: tyro.conf.Positional[Path]
    domain: str | None = None
    episodes: int | None = None
    json: bool = False


def main(args: Verify) -> int:
    """Verify, print the report, and return the exit status."""
    report = verify(
        args.data,
        args.domain,
        episodes=args.episodes,
        progress=lambda members: tqdm(members, desc="verify", unit="episode", disable=None),
    )
    print(report.to_json() if args.json else "\n".join(_lines(report)))
    return int(report.status == "failed")


def _lines(report: Report) -> list[str]:
    domain = report.domain or "no known domain"
    how = " (by the episodes' sizes)" if report.inferred else ""
    sampled = "all" if report.sampled == report.episodes else f"{report.sampled:,} of them, evenly"
    lines = [
        f"{report.source}: {report.episodes:,} episodes of {domain}{how}",
        f"observations, one-step physics, action rows and rewards: looked at in {sampled}",
        "",
    ]
    for check in report.checks:
        lines.append(f"{check.status:<9}{check.name:<18}{check.detail}")
        lines += [f"{'':27}{example}" for example in check.examples]
    lines += ["", f"{'collector':<36}{'episodes':>10}{'steps':>12}{'missing':>10}"]
    for each in report.collectors:
        lines.append(f"{each.name:<36}{each.episodes:10,}{each.steps:12,}{each.missing:10,}")
    if report.tasks:
        lines += ["", "recorded − recomputed reward"]
        lines.append(f"{'task':<36}{'max':>10}{'mean':>12}{'episodes that match':>22}")
    for each in report.tasks:
        matching = f"{'all ' if each.matches else ''}{each.episodes:,}"
        lines.append(f"{each.task:<36}{each.max_error:10.1e}{each.mean_error:12.1e}{matching:>22}")
    return [*lines, "", report.status]


if __name__ == "__main__":
    command.run(lambda: sys.exit(main(tyro.cli(Verify, description=__doc__))))
