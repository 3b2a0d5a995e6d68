"""How long a context fits: the Ring Attention paper's memory tables, from the devices' compilers.

Compiles whole training steps (agent.plan) for devices that need not be here, and writes every
finished one into `cells.csv`, so that the command may be stopped and given again; then draws tables
and plots from it. Tables:

  memory    n trajectories of 4,000 tokens × memory mode, for two models
  longest   longest context by size of the ring, for LLaMA-sized blocks over 8 devices with FSDP
  layer     bytes a layer keeps and works with, against the paper's 6bch
  measured  what steps on simulated CPU devices really take, beside what was planned

A series is searched for the largest size that fits: smaller ones then fit and larger ones do not,
so they are not compiled, and tables mark them as implied. Needs plan-tpu, plan-gpu and, for plots,
matplotlib. A cell takes one to three minutes on two cores.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import ring
from agent.config import MeshConfig, ModelConfig, TrainConfig
from agent.presets import PRESETS
from scripts.bench import context_report
from scripts.bench.cells import Bench, Cell, Cells, Key, OutOfTime, Series
from scripts.bench.context_report import TOKENS, TRAJECTORIES

MEMORY = ("plain", "memory_efficient", "bpt", "ring")
RINGS = (1, 2, 4, 8)
SMALL = "3x128x1 float32"
WIDE = "2x512x8 float32"
LLAMA = {  # layers, width, heads: LLaMA (arXiv 2302.13971), and OpenLLaMA's 3B
    "3B": (26, 3200, 32),
    "7B": (32, 4096, 32),
    "13B": (40, 5120, 40),
    "30B": (60, 6656, 52),
}
LENGTHS = [2**k for k in range(10, 26)]
KINDS = ("a100-80", "h200", "v5e", "v4", "cpu")
MODELS = {  # and the devices they are compiled for; the paper computes in float32 on GPUs
    "24x1024x16 bfloat16": ("h200", "v5e", "v4"),
    "24x1024x16 float32": ("a100-80",),
    SMALL: ("a100-80", "h200", "v5e", "cpu"),
}
LONGEST = ("h200", "a100-80")  # of eight v4 or v5e, most shapes' parameters alone are too large
LAYER = ("h200", "a100-80", "v5e")
SLICES = {
    "v4": {1: "1x1x1", 2: "1x1x2", 4: "1x2x2", 8: "2x2x2"},
    "v5e": {1: "1x1", 2: "1x2", 4: "2x2", 8: "2x4"},
}
MEASURED = (
    (SMALL, "plain", 1, 4),
    (SMALL, "memory_efficient", 1, 4),
    (SMALL, "bpt", 1, 4),
    (SMALL, "ring", 8, 4),
    (SMALL, "ring", 2, 4),
    (WIDE, "bpt", 1, 4),
    (WIDE, "ring", 8, 4),
)
"""Model, memory mode, ring and n of steps that take seconds to minutes on two cores."""
PRODUCTS = {"measured": "", context_report.WITHOUT: "--xla_cpu_experimental_ynn_fusion_type="}
"""Table of cells, and XLA's flags. XLA hands products on CPUs to YNNPACK, whose buffers are outside
of the program and of its plan."""


def main(options: Sequence[str]) -> None:
    """Fills tables, then draws them."""
    tables: dict[str, Callable[[Bench, argparse.Namespace], None]] = {
        "memory": memory,
        "longest": longest,
        "layer": layer,
        "measured": measured,
    }
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench context",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m scripts.bench context --tables memory --kinds h200 --minutes 30",
    )
    parser.add_argument("--tables", nargs="*", choices=tables, default=list(tables))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of devices")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--memory", nargs="+", choices=MEMORY, default=MEMORY)
    parser.add_argument("--shapes", nargs="+", choices=LLAMA, default=list(LLAMA))
    parser.add_argument("--rings", nargs="+", type=int, choices=RINGS, default=RINGS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell after")
    parser.add_argument("--out", type=Path, default=Path("docs/long_context"), help="of cells.csv")
    arguments = parser.parse_args(options)
    jax.config.update("jax_platforms", "cpu")
    ring.simulate_devices(max(RINGS))
    bench = Bench(Cells(arguments.out / "cells.csv"), arguments.minutes)
    try:
        for table in arguments.tables:
            tables[table](bench, arguments)
    except OutOfTime:
        print("out of time: the same command goes on from here")
    context_report.write(list(bench.cells), arguments.out)


def target_of(kind: str, devices: int) -> str:
    """The name of so many devices of a kind."""
    return f"{kind}:{SLICES[kind][devices] if kind in SLICES else devices}"


def run_of(model: ModelConfig, mesh: MeshConfig) -> TrainConfig:
    """A run of some network; lengths are those of its batches."""
    unused = Path("unused")
    config = PRESETS["at_ring_128"].config(run=unused, store=unused, tasks=("walker_run",))
    return dataclasses.replace(config, model=model, mesh=mesh)


def memory_series(name: str, kind: str, mode: Any, size: int) -> Series:
    """A model, named by layers × width × heads and type, in one memory mode on some devices."""
    shape, dtype = name.split()
    layers, width, heads = map(int, shape.split("x"))
    model = ModelConfig(
        packing="rsar",
        layers=layers,
        width=width,
        heads=heads,
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        memory=mode,
        block_size=2048 if width >= 1024 else 512,
    )
    return Series("memory", name, run_of(model, MeshConfig(ring=size)), target_of(kind, size))


def memory(bench: Bench, arguments: argparse.Namespace) -> None:
    """Which n fits in which memory mode."""
    lengths = [TOKENS * n for n in TRAJECTORIES]
    for model in arguments.models:
        for kind in [each for each in MODELS[model] if each in arguments.kinds]:
            for mode in arguments.memory:
                for size in [r for r in arguments.rings if (r > 1) == (mode == "ring")]:
                    bench.boundary(memory_series(model, kind, mode, size), lengths)


def longest_series(shape: str, kind: str, size: int) -> Series:
    """LLaMA-sized blocks on 8 devices, `size` of them a ring and FSDP over all."""
    layers, width, heads = LLAMA[shape]
    model = ModelConfig(
        layers=layers,
        width=width,
        heads=heads,
        dtype="bfloat16",
        memory="bpt" if size == 1 else "ring",
        block_size=2048,
    )
    devices = max(RINGS)
    mesh = MeshConfig(fsdp=devices // size, ring=size)
    return Series("longest", shape, run_of(model, mesh), target_of(kind, devices))


def longest(bench: Bench, arguments: argparse.Namespace) -> None:
    """The longest sequence of powers of two, for rings of 1 (bpt) to 8 of 8 devices."""
    for kind in [each for each in LONGEST if each in arguments.kinds]:
        for shape in arguments.shapes:
            # A ring of R is expected to hold R times the length that bpt does.
            alone: int | None = None
            for size in arguments.rings:
                first = None if alone is None else alone + size.bit_length() - 1
                found = bench.boundary(longest_series(shape, kind, size), LENGTHS, first)
                alone = found if size == 1 and found >= 0 else alone


def layer(bench: Bench, arguments: argparse.Namespace) -> None:
    """Two and four layers at 16,384 tokens a device: their difference is what two layers keep.

    Of a single layer XLA makes no loop, and another program.
    """
    for kind in [each for each in LAYER if each in arguments.kinds]:
        for mode, size in (("ring", 8), ("bpt", 1)):
            for layers in (2, 4):
                series = memory_series("24x1024x16 bfloat16", kind, mode, size)
                model = dataclasses.replace(series.config.model, layers=layers)
                config = dataclasses.replace(series.config, model=model)
                name = f"{layers}x{model.width}x{model.heads}"
                one = dataclasses.replace(series, table="layer", model=name, config=config)
                bench.cell(one, 16_384 * size)


def measured(bench: Bench, arguments: argparse.Namespace) -> None:
    """Steps that run here, with YNNPACK as XLA comes and without."""
    for model, mode, size, trajectories in MEASURED:
        for table, flags in PRODUCTS.items():
            tokens = TOKENS * trajectories
            key = memory_series(model, "cpu", mode, size).key(tokens)._replace(table=table)
            if bench.cells.get(key):
                continue
            if bench.out_of_time:
                raise OutOfTime
            found = dataclasses.replace(peak(model, mode, size, tokens, flags), key=key)
            bench.cells.add(found)
            words = f"measured {found.measured} against {found.total}"
            print(f"{words}: {' '.join(map(str, key))}", flush=True)


def peak(model: str, mode: str, size: int, tokens: int, flags: str = "") -> Cell:
    """What `scripts.bench.peak` measures, in a process of its own with further flags of XLA's."""
    given = os.environ.get("XLA_FLAGS", "")
    environment = {**os.environ, "XLA_FLAGS": f"{given} {flags}".strip()}
    environment.pop("PJRT_NPROC", None)  # for the devices that are simulated here
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench.peak", model, mode, str(size), str(tokens)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    values = json.loads(done.stdout.splitlines()[-1])
    return Cell(**{**values, "key": Key(*values["key"])})
