"""Tables of what fits: cells are kept, searched for where they change, and drawn."""

import dataclasses
import os
import signal
import sys
import time

import pytest

from agent.presets import PRESETS
from scripts import apart
from scripts.bench import cells, context, context_report
from scripts.bench.cells import Bench, Cell, Cells, Key, OutOfTime

GIB = 2**30


def cell(
    tokens: int, total: float, table="memory", model="m float32", memory="bpt", ring=1, **more
):
    """A cell on a device with 16 GiB."""
    key = Key(table, model, f"h200:{ring}", memory, ring, tokens)
    values = dict(
        total=int(total * GIB),
        available=16 * GIB,
        temporaries=int(total * GIB) - 1,
        counted=GIB,
        measured=None,
        seconds=1.5,
        compiler="jax 0",
        date="2026-11-30",
    )
    return Cell(key=key, **{**values, **more})


def test_cells_are_kept_as_they_are(tmp_path):
    kept = Cells(tmp_path / "deep" / "cells.csv")
    aborted = dataclasses.replace(cell(2, 1), total=None, temporaries=None, aborted="SIGABRT")
    made = [
        aborted,
        cell(8000, 3),
        cell(4000, 17, temporaries=None),
        dataclasses.replace(cell(1, 1), total=None, measured=7),
    ]
    for each in made:
        kept.add(each)
    again = Cells(tmp_path / "deep" / "cells.csv")
    assert list(again) == sorted(made, key=lambda each: each.key)
    assert again.get(made[0].key) == made[0] and again.get(made[0].key._replace(ring=2)) is None
    assert [each.fits for each in made] == [None, True, False, True]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["cells.csv"]
    kept.add(cell(16_000, 9))  # `again` has not seen it
    again.add(cell(32_000, 9))
    assert [each.key.tokens for each in Cells(tmp_path / "deep" / "cells.csv")] == [
        *(1, 2, 4_000, 8_000, 16_000, 32_000)
    ]


@pytest.mark.parametrize("limit", [0, 1, 3, 5, 6])
@pytest.mark.parametrize("first", range(6))
def test_the_boundary_is_found_and_nothing_compiled_twice(tmp_path, monkeypatch, limit, first):
    """Sizes 1…6, of which those up to the limit fit."""
    compiled = []
    series = context.memory_series(context.SMALL, "cpu", "bpt", 1)

    def fill(kept, series, tokens):
        compiled.append(tokens)
        room = dict(available=limit * 4 * GIB)
        kept.add(dataclasses.replace(cell(tokens, tokens, **room), key=series.key(tokens)))

    monkeypatch.setattr(cells, "fill", fill)
    kept = Cells(tmp_path / "cells.csv")
    bench, sizes = Bench(kept, 1), [4 * n for n in range(1, 7)]
    assert bench.boundary(series, sizes, first) == limit - 1
    assert len(compiled) == len(set(compiled)) <= abs(first - limit) + 2
    again = Bench(kept, 0)
    assert again.boundary(series, sizes, first) == limit - 1  # without time to compile
    with pytest.raises(OutOfTime):
        again.cell(series, 400)


def test_a_compiler_that_is_aborted_is_a_cell(tmp_path, monkeypatch, capfd):
    series = context.memory_series(context.SMALL, "cpu", "ring", 8)
    monkeypatch.setattr(apart, "run", lambda *_: -signal.SIGABRT)
    bench = Bench(Cells(tmp_path / "cells.csv"), 1)
    assert bench.boundary(series, [4_000, 8_000], 1) == -1
    assert [(each.key.tokens, each.aborted) for each in bench.cells] == [(8_000, "SIGABRT")]
    assert capfd.readouterr().out.startswith("SIGABRT ")
    shown = context_report.memory(list(bench.cells)).splitlines()[-1].split("|")[4:-1]
    assert [each.strip() for each in shown] == ["–"] * 6  # n = 2 is in no table
    row = dataclasses.replace(next(iter(bench.cells)), key=series.key(16_000))
    shown = context_report.memory([row]).splitlines()[-1].split("|")[4:-1]
    assert [each.strip() for each in shown] == ["aborted", *["–"] * 5]
    monkeypatch.setattr(apart, "run", lambda *_: -signal.SIGKILL)
    with pytest.raises(RuntimeError, match="exit status -9"):
        bench.cell(series, 12_000)


def test_a_process_apart_may_be_aborted():
    assert apart.run(os.abort) == -signal.SIGABRT
    assert apart.run(sys.exit, 3) == 3 and apart.run(time.sleep, 0) == 0


@pytest.mark.slow
def test_a_cell_is_compiled_in_a_process_of_its_own(tmp_path):
    series = context.memory_series(context.SMALL, "cpu", "ring", 2)
    cell = Bench(Cells(tmp_path / "cells.csv"), 1).cell(series, 4_000)
    assert cell.fits and cell.temporaries > 2**20 and "jaxlib" in cell.compiler


def test_every_series_can_be_planned():
    for model, kinds in context.MODELS.items():
        for kind in kinds:
            for mode in context.MEMORY:
                context.memory_series(model, kind, mode, 1).config.check()
            context.memory_series(model, kind, "ring", 8).config.check()
    for size in context.RINGS:
        series = context.longest_series("7B", "v5e", size)
        series.config.check()
        assert series.shape(4096) == (8 // size, 4096)
    for preset in ("at_ring_128", "at_small_128"):
        model = PRESETS[preset].model
        name = f"{model.layers}x{model.width}x{model.heads} {model.dtype}"
        assert name in context.MODELS
        assert context.memory_series(name, "cpu", "ring", 8).config.model == model
    series = context.memory_series(context.SMALL, "cpu", "ring", 8)
    at = series.expected([4000, 2**40])
    assert at == 0 and series.shape(4000) == (1, 1000)


MADE = [
    cell(16_000, 5, memory="plain"),
    cell(32_000, 40, memory="plain"),
    cell(512_000, 15, memory="memory_efficient"),
    cell(128_000, 4),
    cell(512_000, 17),
    cell(512_000, 3, memory="ring", ring=8),
    cell(2**10, 18, table="longest", model="3B"),
    cell(2**15, 9, table="longest", model="7B"),
    cell(2**16, 18, table="longest", model="7B"),
    cell(2**18, 9, table="longest", model="7B", memory="ring", ring=8),
    cell(16_384, 1, table="layer", model="2x1024x16", temporaries=500 * 2**20),
    cell(16_384, 1, table="layer", model="4x1024x16", temporaries=700 * 2**20),
    cell(16_000, 1, table="measured", measured=int(1.1 * GIB)),
    cell(16_000, 0.5, table=context_report.WITHOUT, measured=int(0.51 * GIB)),
    cell(32_000, 1, table="measured", measured=int(1.3 * GIB)),
]


def test_tables_mark_what_is_out_and_what_is_implied():
    lines = context_report.memory(MADE).splitlines()
    rows = {line.split("|")[2].strip(): line.split("|")[4:-1] for line in lines if "h200" in line}
    rows = {name: [entry.strip() for entry in row] for name, row in rows.items()}
    assert rows["plain"] == ["5", "OOM 40", "OOM", "OOM", "OOM", "OOM"]
    assert rows["memory_efficient"] == ["fits"] * 5 + ["15"]
    assert rows["bpt"] == ["fits", "fits", "fits", "4", "–", "OOM 17"]
    assert rows["ring of 8"] == ["fits"] * 5 + ["3"]
    verdict = context_report.pattern(MADE).splitlines()[-1].split("|")
    assert [each.strip() for each in verdict[3:-1]] == ["out", "in", "in", "out", "in", "no"]
    none, row = (line.split("|") for line in context_report.longest(MADE).splitlines()[-2:])
    assert [each.strip() for each in none[3:-1]] == ["none", *["–"] * 5]
    assert [each.strip() for each in row[3:-1]] == ["32K", "–", "–", "≥ 256K", "9", "9"]
    # 100 MiB a layer, of which 48 are gradients of 12 · 1024² parameters.
    assert "52 (3.2 bch)" in context_report.layer(MADE)
    assert "300 (18.8 bch)" in context_report.layer(MADE)
    rows = context_report.measured(MADE).splitlines()[-2:]
    ratios = [[row.split("|")[at].strip() for at in (7, 10)] for row in rows]
    assert ratios == [["1.10", "1.02"], ["1.30", "–"]]


def test_a_page_is_filled_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    kept = "<!-- begin longest -->\nold\n<!-- end longest -->\n"
    page.write_text(f"a\n{kept}<!-- begin layer -->\n<!-- end layer -->\nb\n")
    no_plots = [each for each in MADE if each.key.table in ("layer", "measured")]
    context_report.write(no_plots, tmp_path / "page")
    assert page.read_text().startswith(f"a\n{kept}<!-- begin layer -->\n| devices")
    assert "## layer" in (tmp_path / "page" / "tables.md").read_text()


def test_plots_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    context_report.write(MADE, tmp_path)
    for name in ("memory_m_float32.png", "longest.png"):
        assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "size"), [("bpt", 1), ("ring", 8)])
@pytest.mark.parametrize("table", list(context.PRODUCTS))
def test_a_plan_agrees_with_what_a_step_takes(mode, size, table):
    """With YNNPACK steps take more than planned, by its buffers: see docs/long_context.md."""
    found = context.peak(context.WIDE, mode, size, 16_000, context.PRODUCTS[table])
    assert (
        0.85 <= found.measured / found.total <= (1.15 if table == context_report.WITHOUT else 1.25)
    )
