"""Answers of the recall benchmark: their CSV, the table by length, the plots."""

import csv
import io
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agent.report import figure
from agent.tables import table
from exorl.paths import write_whole
from scripts.bench.context_report import fill

MODES = ("ring", "bpt", "own")
NAMES = {"ring": "ring", "bpt": "bpt, one device", "own": "own trajectory only"}
LENGTH = 250  # steps of a trajectory
LENGTHS = tuple(LENGTH * 2**k for k in range(2, 10))
PARTS = 10
"""Of the distances in a chain, nearest first, answers are counted apart."""


class Answers(NamedTuple):
    """How often values of one tenth of the distances were given back exactly, in one chain.

    Attributes:
        seed: of training and of the chains.
        mode: one of `MODES`.
        tokens: of the chain.
        chain: its number.
        part: tenth of the distances, 0 is the nearest.
        asked: questions.
        right: answers with every bit right.
        difference: largest difference of the chain's actions from the ring's.
    """

    seed: int
    mode: str
    tokens: int
    chain: int
    part: int
    asked: int
    right: int
    difference: float


def read(file: Path) -> list[Answers]:
    """Inverse of `write`; nothing if there is no file."""
    if not file.exists():
        return []
    kinds = Answers.__annotations__
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [Answers(**{name: kinds[name](row[name]) for name in Answers._fields}) for row in rows]


def write(file: Path, found: Sequence[Answers]) -> None:
    """One row for each tenth of a chain's distances; the file is replaced whole."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Answers._fields)
    writer.writerows(sorted(found))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text.getvalue().encode())


def accuracy(answers: Sequence[Answers]) -> float:
    """Part of the questions that were answered exactly."""
    return sum(each.right for each in answers) / sum(each.asked for each in answers)


def show(found: Sequence[Answers], trained: int, out: Path) -> None:
    """Prints the table by length, fills the page beside the folder; draws what it says."""
    made = by_length(found)
    print(f"\nExact answers, one number a training seed\n\n{made}")
    fill(out.with_suffix(".md"), {"recall": made})
    figure(out / "recall.png", lambda axes: _draw_lengths(axes, found, trained))
    figure(out / "recall_distance.png", lambda axes: _draw_distances(axes, found))


def accuracies(found: Sequence[Answers], mode: str, tokens: int) -> list[float]:
    """Of every training seed."""
    seeds: dict[int, list[Answers]] = defaultdict(list)
    for each in sorted(found):
        if (each.mode, each.tokens) == (mode, tokens):
            seeds[each.seed].append(each)
    return [accuracy(answers) for answers in seeds.values()]


def by_length(found: Sequence[Answers]) -> str:
    """A row for every length of a chain."""
    modes = [mode for mode in MODES if any(each.mode == mode for each in found)]
    rows = []
    for tokens in sorted({each.tokens for each in found}):
        here = [each for each in found if each.tokens == tokens]
        shares = [" ".join(f"{s:.2%}" for s in accuracies(here, m, tokens)) for m in modes]
        chains = len({each.chain for each in here})
        apart = [each.difference for each in here if each.mode == "bpt"]
        largest = f"{max(apart):.1e}" if apart else ""
        row = [f"{tokens:,}", str(tokens // LENGTH), *shares, str(LENGTH * chains), largest]
        rows.append(row)
    names = [NAMES[mode] for mode in modes]
    return table(["tokens", "n", *names, "questions a seed", "bpt and ring differ by"], rows)


def _draw_lengths(axes: Any, found: Sequence[Answers], trained: int) -> None:
    for color, (mode, style) in enumerate({"ring": "o-", "bpt": "x", "own": "s-"}.items()):
        lengths = sorted({each.tokens for each in found if each.mode == mode})
        seeds = [accuracies(found, mode, tokens) for tokens in lengths]
        many = max(map(len, seeds), default=0)
        label = f"{NAMES[mode]} ({many} training seed{'s' if many > 1 else ''})"
        means = [float(np.mean(each)) for each in seeds]
        axes.plot(lengths, means, style, color=f"C{color}", label=label, markersize=7)
        for tokens, each in zip(lengths, seeds, strict=True):
            axes.plot([tokens] * len(each), each, ".", color=f"C{color}")
    axes.axhline(2.0**-9, color="grey", linestyle=":", label="chance")
    axes.axvline(trained, color="grey", linestyle="--", linewidth=1, label="longest in training")
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [f"{tokens // 1000}K" for tokens in LENGTHS])
    axes.set_xlabel("tokens in the sequence (one pair a token)")
    axes.set_ylabel("values given back exactly")
    axes.set_ylim(-0.03, 1.03)
    axes.legend(fontsize=8)


def _draw_distances(axes: Any, found: Sequence[Answers]) -> None:
    for tokens in sorted({each.tokens for each in found if each.mode == "ring"}):
        chosen = [each for each in found if each.mode == "ring" and each.tokens == tokens]
        parts = sorted({each.part for each in chosen})
        places = [(part + 0.5) / PARTS * tokens for part in parts]
        values = [accuracy([e for e in chosen if e.part == part]) for part in parts]
        axes.plot(places, values, ".-", label=f"{tokens:,} tokens")
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [f"{tokens // 1000}K" for tokens in LENGTHS])
    axes.set_xlabel("distance from the question to its answer, tokens")
    axes.set_ylabel("values given back exactly (ring)")
    axes.legend(fontsize=8)
