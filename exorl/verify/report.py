"""What checks find, gathered episode by episode and told at the end."""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

Status = Literal["ok", "warning", "failed"]

_EXAMPLES = 3

# By check: what a fault makes it, and what was measured, the largest of all episodes.
_CHECKS: dict[str, tuple[Status, str]] = {
    "schema": ("failed", "unreadable episodes: {:.0f}"),
    "digests": ("failed", "episodes changed since they were packed: {:.0f}"),
    "row 0": ("failed", "largest action or reward before the first step: {:.3g}"),
    "action range": ("failed", "largest action: {:.7g}"),
    "discounts": ("failed", "largest difference from 1: {:.3g}"),
    "observations": ("failed", "largest difference from the states': {:.1e}"),
    "one-step physics": ("failed", "largest median of an episode's errors: {:.1e}"),
    "action rows": ("failed", "episodes with shifted actions: {:.0f}"),
    "reward rows": ("failed", "episodes with shifted rewards: {:.0f}"),
    "duplicates": ("warning", "episodes with the states and actions of an earlier one: {:.0f}"),
    "numbers": ("warning", "missing or double: {:.0f}"),
    "skipped": ("warning", "files left out when packing: {:.0f}"),
}


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        name: As listed in `exorl.verify`.
        status: Whether the data passed.
        detail: What was found, for people.
        measured: The number that the detail begins with.
        examples: Up to three faulty episodes, by `collector/file` or path, some with what is
            wrong, and how many more there are.
    """

    name: str
    status: Status
    detail: str
    measured: float
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Collector:
    """How much of the data is one collector's."""

    name: str
    episodes: int  # that could be read
    steps: int
    missing: int  # numbers between the first and the last that no episode has


@dataclass(frozen=True)
class Match:
    """Recorded against recomputed rewards of a task, over rows 1 to T of the sampled episodes."""

    task: str
    max_error: float
    mean_error: float
    episodes: int  # in which all rows agree
    matches: bool  # whether these are all that were sampled


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Attributes:
        source: The folder, zip or store.
        domain: Given, or the store's, or inferred; None if no episode could be read to tell.
        inferred: Whether the domain follows from the sizes of the first episode.
        episodes: How many there are.
        sampled: In how many observations, physics and rewards were recomputed.
        checks: Those that applied.
        collectors: In the order of the source.
        tasks: All tasks of the domain; none if no episode was sampled.
    """

    source: str
    domain: str | None
    inferred: bool
    episodes: int
    sampled: int
    checks: tuple[Check, ...]
    collectors: tuple[Collector, ...]
    tasks: tuple[Match, ...]

    @property
    def status(self) -> Status:
        """The worst of all checks."""
        found = {check.status for check in self.checks}
        return "failed" if "failed" in found else "warning" if "warning" in found else "ok"

    def to_json(self) -> str:
        """The status and the report as a JSON object."""
        return json.dumps({"status": self.status} | asdict(self), indent=1, allow_nan=False)


class Findings:
    """What the checks have measured so far, and where they found faults.

    Attributes:
        notes: By check, what to add to its detail.
    """

    def __init__(self):
        self.notes: dict[str, str] = {}
        self._worst: dict[str, float] = {}
        self._faulty: dict[str, list[str]] = defaultdict(list)

    def add(self, check: str, measured: float, fault: str | None) -> None:
        """One measurement; `fault` begins with the episode if it is one, else it is None."""
        self._worst[check] = max(self._worst.get(check, 0.0), finite(measured))
        if fault is not None:
            self._faulty[check].append(fault)

    def count(self, check: str, fault: str | None) -> None:
        """Likewise, for checks that measure how many episodes are faulty."""
        self.add(check, len(self._faulty[check]) + (fault is not None), fault)

    def checks(self) -> list[Check]:
        """Those that anything was measured for."""
        found = []
        for name, (severity, text) in _CHECKS.items():
            if name in self._worst:
                worst, faulty = self._worst[name], self._faulty[name]
                detail = text.format(worst) + self.notes.get(name, "")
                status = severity if faulty else "ok"
                found.append(Check(name, status, detail, worst, some(faulty)))
        return found


def some(faulty: list[str]) -> tuple[str, ...]:
    """The examples that a check names."""
    more = [f"and {len(faulty) - _EXAMPLES:,} more"] if len(faulty) > _EXAMPLES else []
    return (*faulty[:_EXAMPLES], *more)


def finite(measured: float) -> float:
    """What JSON can hold: the largest float in place of infinity or NaN."""
    return float(np.nan_to_num(measured, nan=np.inf))
