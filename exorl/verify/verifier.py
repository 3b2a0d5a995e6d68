"""Every episode is read once; what must be recomputed can be limited to a sample."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from exorl.episodes import FIELDS, Episode, EpisodeError
from exorl.store import digest
from exorl.tasks import Task, domain_tasks
from exorl.verify.recomputed import OneStep, Rewards, check_observations
from exorl.verify.report import Collector, Findings, Report
from exorl.verify.source import Member, Source, VerifyError, infer_domain, open_source


def verify(
    source: str | Path,
    domain: str | None = None,
    *,
    episodes: int | None = None,
    progress: Callable[[list[Any]], Iterable[Any]] = iter,
) -> Report:
    """Checks a folder or zip of episodes, or a packed store, holding one episode at a time.

    Args:
        source: Where the episodes are.
        domain: Whose; if None, the store's, or that whose sizes the first episode has.
        episodes: Observations, physics and rewards are recomputed in only so many episodes,
            evenly spread; None for all. The other checks always look at every episode.
        progress: Wraps the list of episodes while it is worked off; `tqdm.tqdm` fits.

    Raises:
        EpisodeError: There is no such source, or a file in it is not named like an episode.
        StoreError: The store can't be opened.
        TaskError: There is no such domain.
        VerifyError: There are no episodes, or they are of another domain or of none.
    """
    if episodes is not None and episodes < 1:
        raise VerifyError(f"{episodes} episodes to sample, expected at least 1")
    opened = open_source(Path(source), domain)
    members = opened.members
    found = opened.domain or infer_domain(members)
    tasks = domain_tasks(found) if found else ()
    task = tasks[0] if tasks else None  # whose sizes are the domain's
    count = min(episodes or len(members), len(members))
    sample = {i * len(members) // count for i in range(count)}

    findings, lengths = Findings(), defaultdict(list)
    rewards, physics = Rewards(tasks, findings), OneStep(tasks, findings, count)
    seen: dict[str, str] = {}
    with np.errstate(over="ignore", invalid="ignore"):  # absurd numbers become faults
        for i, member, episode in _readable(progress(members), task, findings):
            lengths[member.collector].append(len(episode))
            _check_rows(member, episode, findings)
            _check_content(member, episode, seen, findings)
            if task and i in sample:
                check_observations(member, episode, task, findings)
                rewards.add(member, episode)
                physics.add(member, episode)
        physics.finish()
    collectors = _check_numbers(opened, lengths, findings)
    for reason in opened.skipped:
        findings.count("skipped", reason)
    return Report(
        source=str(source),
        domain=found,
        inferred=opened.domain is None and found is not None,
        episodes=len(members),
        sampled=rewards.episodes,
        checks=(*findings.checks(), *rewards.checks()),
        collectors=collectors,
        tasks=rewards.matches(),
    )


def _readable(
    members: Iterable[Member], task: Task | None, findings: Findings
) -> Iterator[tuple[int, Member, Episode]]:
    for i, member in enumerate(members):
        try:
            episode = member.read(task)
        except EpisodeError as error:
            findings.count("schema", str(error))
            continue
        findings.count("schema", None)
        yield i, member, episode


def _check_rows(member: Member, episode: Episode, findings: Findings) -> None:
    start = max(float(np.abs(each[0]).max()) for each in (episode.action, episode.reward))
    findings.add("row 0", start, member.label if start else None)
    largest = np.abs(episode.action).max(axis=1)
    row = int(largest.argmax())
    beyond = f"{member.label}: {largest[row]:.7g} in row {row}" if largest[row] > 1 else None
    findings.add("action range", float(largest[row]), beyond)
    off = np.abs(episode.discount[:, 0] - 1)
    row = int(off.argmax())
    other = f"{member.label}: {episode.discount[row, 0]:g} in row {row}" if off[row] else None
    findings.add("discounts", float(off[row]), other)


def _check_content(
    member: Member, episode: Episode, seen: dict[str, str], findings: Findings
) -> None:
    """Compares digests with the recorded one and those seen before."""
    if member.digest is not None:
        found = _digest(episode, FIELDS)
        findings.count("digests", member.label if found != member.digest else None)
    # Without the reward: the same episode may have been recorded for two tasks.
    acted = _digest(episode, ("observation", "action", "physics"))
    twin = seen.get(acted)
    findings.count("duplicates", f"{member.label} repeats {twin}" if twin else None)
    seen.setdefault(acted, member.label)


def _digest(episode: Episode, names: Iterable[str]) -> str:
    return digest(*(np.ascontiguousarray(getattr(episode, name)) for name in names))


def _check_numbers(
    source: Source, lengths: dict[str, list[int]], findings: Findings
) -> tuple[Collector, ...]:
    """Whether each collector's episodes are numbered one by one."""
    numbers: dict[str, Counter[int]] = defaultdict(Counter)
    for member in source.members:
        numbers[member.collector][member.number] += 1
    collectors = []
    for name, each in numbers.items():
        first, last = min(each), max(each)
        missing, doubles = last - first + 1 - len(each), each.total() - len(each)
        steps = lengths.get(name, [])
        collectors.append(Collector(name, len(steps), sum(steps), missing))
        # Gaps that a selection left are meant.
        gaps = 0 if source.selected else missing
        fault = f"{name}: {gaps:,} of {first} to {last} missing, {doubles:,} double"
        findings.add("numbers", gaps + doubles, fault if gaps or doubles else None)
    return tuple(collectors)
