"""Tables and plots of finished cells (scripts.bench.cells): nothing is compiled here.

Cells that were not compiled follow from others of their series where these tell: what is shorter
than a sequence that fits fits, and what is longer than one that does not does not.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agent.report import figure
from agent.tables import table
from exorl.paths import write_whole
from ring import cost
from scripts.bench.cells import Cell

TOKENS = 4_000
"""Of a trajectory: 1,000 steps of four tokens."""

TRAJECTORIES = (4, 8, 16, 32, 64, 128)
NOT_COMPILED = "–"
ABORTED = "aborted"
"""Of a compiler, by a failed check of its own."""
WITHOUT = "measured without YNNPACK"
_FIT, _OUT, _OPEN = "#4c9f70", "#c8553d", "#dddddd"

CLAIMS = (
    ("plain", 1, 32, False),
    ("memory_efficient", 1, 32, False),
    ("bpt", 1, 32, True),
    ("bpt", 1, 128, False),
    ("ring", 8, 128, True),
)
"""Table 5 of the Ring Attention paper, and of plain attention table 4 of Blockwise Parallel
Transformers (arXiv 2305.19370): memory mode, ring, n, whether it ran."""


def write(cells: Sequence[Cell], out: Path) -> None:
    """Tables into `tables.md`, and into the page beside the folder where that has marks; plots."""
    made = {
        "memory": memory(cells),
        "pattern": pattern(cells),
        "longest": longest(cells),
        "layer": layer(cells),
        "measured": measured(cells),
        "compilers": compilers(cells),
    }
    whole = "\n\n".join(f"## {name}\n\n{text}" for name, text in made.items() if text)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "tables.md", f"{whole}\n".encode())
    fill(out.with_suffix(".md"), made)
    for model in _models(cells):
        plot_memory(out, cells, model)
    if any(cell.key.table == "longest" for cell in cells):
        plot_longest(out / "longest.png", cells)


def fill(page: Path, made: dict[str, str]) -> None:
    """Replaces what stands between `<!-- begin NAME -->` and `<!-- end NAME -->` in a page.

    What there is nothing for stays as it is.
    """
    if not page.exists():
        return
    text = page.read_text()
    for name, body in ((name, body) for name, body in made.items() if body):
        marks = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
        text = re.sub(marks, rf"\g<1>{body}\n\g<2>", text, flags=re.DOTALL)
    write_whole(page, text.encode())


def select(cells: Iterable[Cell], **wanted: Any) -> list[Cell]:
    """Cells whose key has the given values, shortest first."""
    found = [c for c in cells if all(getattr(c.key, n) == value for n, value in wanted.items())]
    return sorted(found, key=lambda cell: cell.key.tokens)


def fits(series: Sequence[Cell], tokens: int) -> bool | None:
    """Whether so many tokens fit, from one series' cells; None if they do not tell."""
    if any(cell.fits and cell.key.tokens >= tokens for cell in series):
        return True
    if any(cell.fits is False and cell.key.tokens <= tokens for cell in series):
        return False
    return None


def _entry(series: Sequence[Cell], tokens: int) -> str:
    for cell in series:
        if cell.key.tokens == tokens and cell.fits is not None:
            return gib(cell.total) if cell.fits else f"OOM {gib(cell.total)}".strip()
    implied = fits(series, tokens)
    if implied is None:
        return ABORTED if any(cell.key.tokens == tokens for cell in series) else NOT_COMPILED
    return "fits" if implied else "OOM"


def gib(count: int | None) -> str:
    """Bytes in GiB, or nothing."""
    if count is None:
        return ""
    return f"{count / 2**30:.3g}" if count < 100 * 2**30 else f"{count / 2**30:,.0f}"


def kind_of(cell: Cell) -> str:
    """Of a cell's devices, without their number."""
    return cell.key.target.partition(":")[0]


def _models(cells: Sequence[Cell]) -> list[str]:
    return sorted({cell.key.model for cell in select(cells, table="memory")})


def _series(cells: Sequence[Cell], **wanted: Any) -> dict[tuple[str, str, int], list[Cell]]:
    """Cells by kind of device, memory mode and ring."""
    found: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in select(cells, **wanted):
        found.setdefault((kind_of(cell), cell.key.memory, cell.key.ring), []).append(cell)
    order = {name: at for at, name in enumerate(("plain", "memory_efficient", "bpt", "ring"))}
    return dict(sorted(found.items(), key=lambda item: (item[0][0], order[item[0][1]], item[0][2])))


def _name(mode: str, size: int) -> str:
    return f"ring of {size}" if mode == "ring" else mode


def memory(cells: Sequence[Cell]) -> str:
    """GiB a device by n and memory mode, for every model and kind of device."""
    parts = []
    for model in _models(cells):
        rows = [
            [kind, _name(mode, size), gib(series[0].available)]
            + [_entry(series, TOKENS * n) for n in TRAJECTORIES]
            for (kind, mode, size), series in _series(cells, table="memory", model=model).items()
        ]
        header = ["devices", "memory", "GiB there"] + [f"n = {n}" for n in TRAJECTORIES]
        parts.append(f"**{model}**\n\n{table(header, rows)}")
    return "\n\n".join(parts)


def pattern(cells: Sequence[Cell]) -> str:
    """The paper's verdicts beside those found."""
    rows = []
    for model in _models(cells):
        series = _series(cells, table="memory", model=model)
        for kind in dict.fromkeys(kind for kind, *_ in series):
            found = [fits(series.get((kind, m, size), []), TOKENS * n) for m, size, n, _ in CLAIMS]
            agree = [a == claim[3] for a, claim in zip(found, CLAIMS, strict=True) if a is not None]
            words = {None: NOT_COMPILED, True: "in", False: "out"}
            whole = "yes" if all(agree) and len(agree) == len(CLAIMS) else "no"
            whole = whole if None not in found or not all(agree) else NOT_COMPILED
            rows.append([model, kind, *(words[each] for each in found), whole])
    paper = ["the paper", "", *("in" if claim[3] else "out" for claim in CLAIMS), ""]
    header = ["model", "devices"] + [f"{_name(m, size)}, n = {n}" for m, size, n, _ in CLAIMS]
    return table([*header, "the same"], [paper, *rows]) if rows else ""


def longest(cells: Sequence[Cell]) -> str:
    """Longest context in tokens by ring, and bytes of a ring of 8 at 8 times bpt's longest."""
    rows = []
    models = {cell.key.model for cell in select(cells, table="longest")}
    for model in sorted(models, key=_billions):
        by_ring = _series(cells, table="longest", model=model)
        for kind in dict.fromkeys(kind for kind, *_ in by_ring):
            rings = {size: series for (k, _, size), series in by_ring.items() if k == kind}
            found = {size: _longest(series) for size, series in rings.items()}
            row = [_tokens(found.get(size)) for size in (1, 2, 4, 8)]
            most, _ = found.get(1, (0, False))
            compared = [_entry(rings.get(size, []), size * most) for size in (1, 8)]
            rows.append([model, f"8 × {kind}", *row, *compared])
    header = ["model", "devices", "bpt", "ring of 2", "ring of 4", "ring of 8"]
    header += ["GiB of bpt there", "GiB of a ring of 8 at 8 times that"]
    return table(header, rows) if rows else ""


def _longest(series: Sequence[Cell]) -> tuple[int, bool]:
    """The longest that fits (0: none), and whether a longer one is known not to."""
    fitting = [cell.key.tokens for cell in series if cell.fits]
    most = max(fitting, default=0)
    return most, any(cell.fits is False and cell.key.tokens > most for cell in series)


def _tokens(found: tuple[int, bool] | None) -> str:
    if found is None:
        return NOT_COMPILED
    tokens, bounded = found
    return f"{'' if bounded else '≥ '}{tokens // 1024:,}K" if tokens else "none"


def layer(cells: Sequence[Cell]) -> str:
    """Bytes that a layer keeps, and that one works with, beside 6bch."""
    rows = []
    found: dict[Any, list[Cell]] = _series(cells, table="layer")  # keys: kind, mode, size
    for (kind, mode, size), series in found.items():
        by_depth = {int(cell.key.model.partition("x")[0]): cell for cell in series}
        if not {2, 4} <= set(by_depth) or not all(cell.temporaries for cell in by_depth.values()):
            continue
        two, four = (by_depth[depth].temporaries or 0 for depth in (2, 4))
        tokens, width = series[0].key.tokens, int(series[0].key.model.split("x")[1])
        unit = tokens // size * width
        gradients = 4 * 12 * width**2 // size  # of a layer's parameters, in shards
        kept = (four - two) // 2 - gradients
        working = two - 2 * (kept + gradients)
        paper = cost.activation_bytes(mode, 1, tokens, width, 16, size)
        rows.append(
            [kind, _name(mode, size), f"{tokens // size:,}"]
            + [f"{each / 2**20:,.0f} ({each / unit:.1f} bch)" for each in (kept, working, paper)]
        )
    header = ["devices", "memory", "c", "kept a layer, MiB", "working, MiB", "the paper's, MiB"]
    return table(header, rows) if rows else ""


def measured(cells: Sequence[Cell]) -> str:
    """Planned and measured bytes on simulated CPU devices."""
    alone = {c.key._replace(table="measured"): c for c in select(cells, table=WITHOUT)}
    rows = []
    for cell in select(cells, table="measured"):
        key = cell.key
        row = [key.model, _name(key.memory, key.ring), f"{key.tokens:,}", f"{cell.seconds:.1f}"]
        rows.append([*row, *_against(cell), *_against(alone.get(key))])
    header = ["model", "memory", "tokens", "s a step"]
    found = ["planned, MiB", "measured, MiB", "measured ÷ planned"]
    bare = [f"without YNNPACK: {found[0]}", *found[1:]]
    return table([*header, *found, *bare], rows) if rows else ""


def _against(cell: Cell | None) -> list[str]:
    if cell is None or not cell.total or not cell.measured:
        return [NOT_COMPILED] * 3
    sizes = [f"{each / 2**20:,.0f}" for each in (cell.total, cell.measured)]
    return [*sizes, f"{cell.measured / cell.total:.2f}"]


def compilers(cells: Sequence[Cell]) -> str:
    """What compiled the cells, and when."""
    rows = []
    for compiler in sorted({cell.compiler for cell in cells}):
        dates = sorted(cell.date for cell in cells if cell.compiler == compiler)
        days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        rows.append([compiler, days, str(len(dates))])
    return table(["compiler", "compiled on", "cells"], rows) if rows else ""


def plot_memory(out: Path, cells: Sequence[Cell], model: str) -> None:
    """A row for each memory mode and kind of device, a column for each n; OOM is marked."""
    series = _series(cells, table="memory", model=model)

    def draw(axes: Any) -> None:
        labels = [f"{kind}  {_name(mode, size)}" for kind, mode, size in series]
        for row, each in enumerate(series.values()):
            for column, n in enumerate(TRAJECTORIES):
                inside = fits(each, TOKENS * n)
                color = _OPEN if inside is None else _FIT if inside else _OUT
                axes.barh(row, 0.96, 0.92, left=column - 0.48, color=color)
                words = _entry(each, TOKENS * n).replace("OOM ", "OOM\n")
                axes.text(column, row, words, ha="center", va="center", fontsize=7)
        axes.set_xlim(-0.5, len(TRAJECTORIES) - 0.5)
        axes.set_ylim(len(series) - 0.5, -0.5)
        axes.set_xticks(range(len(TRAJECTORIES)), [str(n) for n in TRAJECTORIES])
        axes.set_yticks(range(len(labels)), labels, fontsize=8)
        axes.set_xlabel("n, trajectories of 4,000 tokens in one sequence")
        axes.set_title(f"{model}: GiB a device; words are implied by other cells", fontsize=10)

    name = model.replace(" ", "_")
    figure(out / f"memory_{name}.png", draw, size=(7, 1.2 + 0.36 * len(series)))


def plot_longest(path: Path, cells: Sequence[Cell]) -> None:
    """Longest context against the ring's size; dashed: R times bpt's; crosses: OOM."""
    groups: dict[tuple[float, str], dict[int, list[Cell]]] = {}
    for cell in select(cells, table="longest"):
        rings = groups.setdefault((_billions(cell.key.model), kind_of(cell)), {})
        rings.setdefault(cell.key.ring, []).append(cell)

    def draw(axes: Any) -> None:
        for at, ((billions, kind), rings) in enumerate(sorted(groups.items())):
            beside = 1.03 ** (at - len(groups) / 2)  # lines that coincide stay visible
            found = {size: _longest(series)[0] for size, series in sorted(rings.items())}
            fitting = [(size * beside, tokens) for size, tokens in found.items() if tokens]
            color, label = f"C{at}", f"{billions:g}B, 8 × {kind}"
            cells_of = [(size * beside, c) for size, series in rings.items() for c in series]
            out = [(x, c.key.tokens) for x, c in cells_of if c.fits is False]
            axes.plot([x for x, _ in fitting], [y for _, y in fitting], "o-", c=color, label=label)
            axes.plot([x for x, _ in out], [y for _, y in out], "x", c=color)
            if found.get(1):
                line = [found[1], 8 * found[1]]
                axes.plot([beside, 8 * beside], line, "--", c=color, linewidth=0.8)
        lengths = sorted({cell.key.tokens for cell in select(cells, table="longest")})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks([1, 2, 4, 8], ["bpt", "2", "4", "8"])
        axes.set_yticks(lengths, [f"{tokens // 1024:,}K" for tokens in lengths])
        axes.set_xlabel("devices of 8 that are a ring")
        axes.set_ylabel("longest context, tokens")
        axes.set_title("o fits, × OOM, dashed: R times bpt's", fontsize=10)
        axes.legend(fontsize=8)

    figure(path, draw)


def _billions(model: str) -> float:
    return float(model.removesuffix("B"))
