"""What follows from an episode's states: observations, the next states, and rewards."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from exorl.backends import measure
from exorl.domains import DOMAINS
from exorl.episodes import Episode
from exorl.rewards import Mode, reward
from exorl.simulation import SimulationError, one_step
from exorl.tasks import Task
from exorl.verify.report import Check, Findings, Match, Status, finite, some
from exorl.verify.source import Member

# Float32 rewards recomputed from float64 states differ by 1e-7, those of another task by 0.1 in
# some row, unless neither pays anything.
REWARD_TOLERANCE = 1e-5

# Likewise for observations; of entries beyond 1 it is the relative error.
OBSERVATION_TOLERANCE = 1e-5

# MuJoCo's warm start is not in the state: a sound episode's median is at most some 1e-7, and single
# steps reach 1e-5. Random actions of another row make the median 5e-3 in the maze, 10 for walker.
ONE_STEP_TOLERANCE = 1e-4

# Beyond this, MuJoCo takes a state for diverged, and says so each time.
_DIVERGED = 1e10

# Below this median, actions of neighbouring rows are too similar to tell which was applied.
_UNTOLD = 1e-6

# States simulated at a time; transitions of a dataset at least, of an episode at least.
_BATCH, _TRANSITIONS, _TRANSITIONS_EACH = 4096, 512, 4

# Row t holds what belongs into row t + shift.
_SHIFTS = {0: "in place", 1: "one row early", -1: "one row late"}


def check_observations(member: Member, episode: Episode, task: Task, findings: Findings) -> None:
    """Compares observations with those of the states, but for what sensors felt."""
    domain, physics = DOMAINS[task.domain], episode.physics
    if hasattr(domain, "observation"):
        entries, expected = np.arange(task.observation_dim), domain.observation(physics)
    else:
        entries, expected = domain.observed_state(physics, measure(task, physics))
    found = episode.observation[:, entries]
    error = np.abs(found - expected) / np.maximum(np.abs(expected), 1)
    row, column = np.unravel_index(error.argmax(), error.shape)
    worst = float(error[row, column])
    where = f"{member.label}: entry {entries[column]} in row {row}"
    findings.add("observations", worst, None if worst <= OBSERVATION_TOLERANCE else where)


class OneStep:
    """Whether the simulator gets from sampled states to the next, and by which row's actions."""

    def __init__(self, tasks: Sequence[Task], findings: Findings, episodes: int):
        """Prepares to sample so many episodes of a domain, given by its tasks."""
        self._task = tasks[0].name if tasks else ""
        self._findings = findings
        self._each = max(_TRANSITIONS_EACH, -(-_TRANSITIONS // episodes))
        self._pending: list[tuple[str, np.ndarray, np.ndarray, np.ndarray]] = []
        self._errors: list[np.ndarray] = []

    def add(self, member: Member, episode: Episode) -> None:
        """Samples an episode's transitions, each with the actions of three rows."""
        rows = np.unique(np.linspace(1, len(episode), self._each).astype(int))
        found_in = np.stack([rows - shift for shift in _SHIFTS], axis=1).clip(0, len(episode))
        if np.abs(episode.physics).max() >= _DIVERGED:
            self._judge(member.label, np.full(found_in.shape, np.inf))
            return
        before = np.repeat(episode.physics[rows - 1], len(_SHIFTS), axis=0)
        action = episode.action[found_in].reshape(len(before), -1)
        after = np.repeat(episode.physics[rows], len(_SHIFTS), axis=0)
        self._pending.append((member.label, before, action, after))
        if sum(len(before) for _, before, _, _ in self._pending) >= _BATCH:
            self._simulate()

    def finish(self) -> None:
        """Simulates what is left."""
        self._simulate()
        if self._errors:
            error = np.concatenate(self._errors)
            median, largest = finite(float(np.median(error))), finite(error.max())
            note = f"; of all {len(error):,} steps {median:.1e}, at most {largest:.1e}"
            self._findings.notes["one-step physics"] = note

    def _simulate(self) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        labels, before, action, after = zip(*pending, strict=True)
        try:
            # All at once, because it takes long to build a simulation.
            reached = one_step(self._task, np.concatenate(before), np.concatenate(action))
            parts = np.split(reached, np.cumsum([len(each) for each in before])[:-1])
        except SimulationError:
            parts = [self._reached(*each) for each in zip(before, action, strict=True)]
        for label, part, expected in zip(labels, parts, after, strict=True):
            error = np.abs(part - expected).max(axis=1).reshape(-1, len(_SHIFTS))
            self._judge(label, error)

    def _reached(self, before: np.ndarray, action: np.ndarray) -> np.ndarray:
        try:
            return one_step(self._task, before, action)
        except SimulationError:
            return np.full_like(before, np.inf)

    def _judge(self, label: str, error: np.ndarray) -> None:
        """One episode's errors `[steps, shifts]`."""
        self._errors.append(error[:, 0])
        median = dict(zip(_SHIFTS, np.median(error, axis=0).tolist(), strict=True))
        wrong = median[0] > ONE_STEP_TOLERANCE
        self._findings.add("one-step physics", median[0], label if wrong else None)
        best = min(median, key=median.__getitem__)
        clear = median[0] > max(10 * median[best], _UNTOLD)
        shifted = clear and median[best] <= ONE_STEP_TOLERANCE
        self._findings.count("action rows", f"{label}: {_SHIFTS[best]}" if shifted else None)


class Rewards:
    """Which tasks the recorded rewards are of.

    Attributes:
        episodes: How many were looked at.
    """

    def __init__(self, tasks: Sequence[Task], findings: Findings):
        """Prepares to compare with all `tasks`, those of one domain."""
        self.episodes = 0
        self._tasks, self._findings = [task.name for task in tasks], findings
        self._sums = {name: np.zeros(3) for name in self._tasks}  # error, rows, matching episodes
        self._max = dict.fromkeys(self._tasks, 0.0)
        self._exact: Counter[frozenset[str]] = Counter()  # episodes by the tasks they match
        self._free: Counter[frozenset[str]] = Counter()  # likewise, if control costs nothing
        self._known: Counter[str] = Counter()  # episodes of any task, by collector
        self._unknown: dict[str, list[str]] = defaultdict(list)  # labels by collector

    def add(self, member: Member, episode: Episode) -> None:
        """Compares one episode's rewards with all tasks'."""
        self.episodes += 1
        computed = self._computed(episode, "exact")
        found = _matching(episode, computed, 0)
        for i, (task, values) in enumerate(computed.items()):
            error = _error(episode, i, values, 0)
            self._max[task] = max(self._max[task], finite(error.max()))
            self._sums[task] += error.sum(), len(error), task in found
        shift = 0 if found else _shift(episode, computed)
        self._findings.count("reward rows", f"{member.label}: {_SHIFTS[shift]}" if shift else None)
        if found:
            self._exact[found] += 1
        elif not shift:
            free = _matching(episode, self._computed(episode, "exorl"), 0)
            if not free:
                self._unknown[member.collector].append(member.label)
                return
            self._free[free] += 1
        self._known[member.collector] += 1

    def matches(self) -> tuple[Match, ...]:
        """Of all tasks, in their order; none without an episode."""
        if not self.episodes:
            return ()
        found = []
        for task, (error, rows, matching) in self._sums.items():
            all_match = int(matching) == self.episodes
            mean = finite(error / rows)
            found.append(Match(task, self._max[task], mean, int(matching), all_match))
        return tuple(found)

    def checks(self) -> tuple[Check, ...]:
        """Whether what was recorded is a task's rewards; nothing without an episode."""
        if not self.episodes:
            return ()
        unknown = [label for labels in self._unknown.values() for label in labels]
        mixed = [
            label
            for collector, labels in self._unknown.items()
            for label in labels
            if self._known[collector]
        ]
        named = self._named(self._exact)
        for task, count in self._named(self._free):
            named.append((f"{task} without the cost of control", count))
        if unknown:
            named.append(("no task", len(unknown)))
        parts = [f"{what} in {count:,} of {self.episodes:,} episodes" for what, count in named]
        status: Status = "failed" if mixed else "warning" if unknown or self._free else "ok"
        detail = "; ".join(parts) or "a task's, but shifted"
        measured = min(match.max_error for match in self.matches())
        return (Check("recorded reward", status, detail, measured, some(mixed or unknown)),)

    def _computed(self, episode: Episode, mode: Mode) -> dict[str, np.ndarray]:
        """Rewards `[T+1]` by task."""
        states = episode.observation, episode.action, episode.physics
        return {task: reward(task, *states, mode=mode) for task in self._tasks}

    def _named(self, found: Counter[frozenset[str]]) -> list[tuple[str, int]]:
        """The tasks that explain most episodes first, without those that explain no more.

        An episode that earned nothing matches other tasks that paid nothing, too.
        """
        left, named = dict(found), []
        while left:
            counts = {
                task: sum(n for each, n in left.items() if task in each) for task in self._tasks
            }
            best = max(counts, key=counts.__getitem__)
            covered = [each for each in left if best in each]
            alike = [task for task in self._tasks if all(task in each for each in covered)]
            named.append((" and ".join(alike), counts[best]))
            left = {each: n for each, n in left.items() if best not in each}
        return named


def _matching(episode: Episode, computed: dict[str, np.ndarray], shift: int) -> frozenset[str]:
    """The tasks whose rewards were recorded in all rows; none unless all that were recorded are."""
    matching = frozenset(
        task
        for i, (task, values) in enumerate(computed.items())
        if _error(episode, i, values, shift).max() <= REWARD_TOLERANCE
    )
    return matching if len(matching) >= episode.reward.shape[1] else frozenset()


def _shift(episode: Episode, computed: dict[str, np.ndarray]) -> int:
    """By how many rows the rewards are shifted against those of a task; 0 if they are not."""
    if len(episode) < 3:  # too short to tell
        return 0
    return next((shift for shift in (1, -1) if _matching(episode, computed, shift)), 0)


def _error(episode: Episode, task: int, computed: np.ndarray, shift: int) -> np.ndarray:
    """How far recorded rewards are from those `[T+1]` computed for the row `shift` further on.

    Of the rows 1 to T for which there are both, T of them without a shift. Where all tasks'
    rewards were recorded, as in the published maze, those of the domain's task of that number.
    """
    rows = np.arange(max(1, 1 - shift), len(episode) + 1 - max(0, shift))
    recorded = episode.reward[rows, task if episode.reward.shape[1] > 1 else 0]
    return np.abs(recorded.astype(np.float64) - computed[rows + shift])
