"""Named settings: shapes, optimizer and mesh; the store, tasks and run folder are the user's."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.config import (
    DataConfig,
    MeshConfig,
    Method,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)


@dataclass(frozen=True)
class Preset:
    """A description and the settings that differ from the defaults of `agent.config`."""

    description: str
    method: Method = "at"
    data: dict[str, Any] = field(default_factory=dict)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def config(self, *, run: Path, store: Path, tasks: tuple[str, ...]) -> TrainConfig:
        """The training run of this preset on some data."""
        return TrainConfig(
            run=run,
            data=DataConfig(store=store, tasks=tasks, **self.data),
            method=self.method,
            model=self.model,
            optimizer=self.optimizer,
            mesh=self.mesh,
        )


# Learning rates and widths of the baselines are the best of the grids in docs/training.md.
_BASELINE_MODEL = ModelConfig(packing="rsa", layers=2, width=256, memory="plain")

_DEMO_MODEL = ModelConfig(chunk=8, positions="learned", layers=2, width=64, heads=2)
_DEMO_OPTIMIZER = OptimizerConfig(steps=1_500, learning_rate=3e-3)
_DEMO_MESH = MeshConfig(data=2, ring=4, simulated=True)

# Layers and heads of the paper's 350M parameters are unknown; these make 302M. bfloat16 as there.
_PAPER_MODEL = ModelConfig(
    packing="rsar", layers=24, width=1024, heads=16, dtype="bfloat16", block_size=2048
)
_PAPER_OPTIMIZER = OptimizerConfig(steps=10_000, learning_rate=1e-4, warmup=1_000)

PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        "one-headed and minute, for trying things out",
        data={"batch_tokens": 1_000},
        model=ModelConfig(chunk=8, layers=2, width=64, heads=1),
        optimizer=OptimizerConfig(steps=20, learning_rate=1e-3, warmup=5),
    ),
    "demo": Preset(
        "Agentic Transformer of `make demo`: a ring of 4 × data 2 on 8 simulated devices",
        data={"top": 0.1},
        model=replace(_DEMO_MODEL, dropout=0.2),
        optimizer=_DEMO_OPTIMIZER,
        mesh=_DEMO_MESH,
    ),
    "demo_hidden": Preset(
        "the same for the hidden tasks of `make demo`",
        model=_DEMO_MODEL,
        optimizer=_DEMO_OPTIMIZER,
        mesh=_DEMO_MESH,
    ),
    "demo_dt": Preset(
        "Decision Transformer of `make demo`: windows of 20 steps",
        method="dt",
        data={"batch_tokens": 32 * 20 * 3},
        model=ModelConfig(packing="rsa", chunk=8, layers=2, width=64, heads=2, memory="plain"),
        optimizer=OptimizerConfig(steps=1_500, learning_rate=8e-3),
    ),
    "demo_bc10": Preset(
        "behaviour cloning of the best 10 % of `make demo`",
        method="bc10",
        data={"batch_tokens": 256},
        model=_BASELINE_MODEL,
        optimizer=OptimizerConfig(steps=6_000, learning_rate=3e-4),
    ),
    "at_step": Preset(
        "recommended start on one GPU: 32 trajectories, one token a step",
        data={"trajectories": 32, "batch_tokens": 128_000},
        model=ModelConfig(layers=3, width=128, heads=1),
        optimizer=OptimizerConfig(steps=10_000, learning_rate=1e-3, warmup=500),
    ),
    "at_paper": Preset(
        "the Agentic Transformer paper: 4 trajectories, five tokens a step, batches of 64",
        data={"fixed": True, "top": 1.0, "batch_tokens": 64 * 4 * 1000 * 5},
        model=ModelConfig(packing="rsard", layers=3, width=128, heads=1, dropout=0.1),
        optimizer=replace(
            _PAPER_OPTIMIZER,
            steps=100_000,
            warmup=10_000,
            final_fraction=1.0,
            clip=0.25,
            accumulation=16,
        ),
    ),
    "at_bpt_32": Preset(
        "Ring Attention's comparison, its BPT column: 32 trajectories, 128,000 tokens",
        data={"trajectories": 32, "batch_tokens": 128_000},
        model=replace(_PAPER_MODEL, memory="bpt"),
        optimizer=_PAPER_OPTIMIZER,
    ),
    "at_ring_128": Preset(
        "Ring Attention's comparison, its ring column: 128 trajectories, 512,000 tokens, ring of 8",
        data={"trajectories": 128, "batch_tokens": 512_000},
        model=_PAPER_MODEL,
        optimizer=_PAPER_OPTIMIZER,
        mesh=MeshConfig(ring=8),
    ),
    "at_small_128": Preset(
        "128 trajectories, 512,000 tokens, for one GPU",
        data={"trajectories": 128, "batch_tokens": 512_000},
        model=ModelConfig(packing="rsar", layers=3, width=128, heads=1),
        optimizer=OptimizerConfig(steps=10_000, learning_rate=1e-3, warmup=500),
    ),
    "at_step_128": Preset(
        "128 trajectories, one token a step: 15 times less work than at_ring_128, ring of 8",
        data={"trajectories": 128, "batch_tokens": 128_000},
        model=ModelConfig(layers=12, width=768, heads=6, dtype="bfloat16", block_size=2048),
        optimizer=OptimizerConfig(steps=10_000, learning_rate=3e-4, warmup=1_000),
        mesh=MeshConfig(ring=8),
    ),
    "dt": Preset(
        "Decision Transformer: windows of 20 steps",
        method="dt",
        data={"batch_tokens": 64 * 20 * 3},
        model=ModelConfig(packing="rsa", layers=3, width=128, heads=1, dropout=0.1),
        optimizer=OptimizerConfig(steps=100_000, learning_rate=1e-4, warmup=10_000, clip=0.25),
    ),
    "dt_long": Preset(
        "Decision Transformer on whole episodes: long context without hindsight",
        method="dt_long",
        data={"batch_tokens": 32 * 1000 * 3},
        model=ModelConfig(packing="rsa", layers=3, width=128, heads=1, dropout=0.1),
        optimizer=OptimizerConfig(steps=10_000, learning_rate=1e-3, warmup=500),
    ),
    "bc": Preset(
        "behaviour cloning of all episodes",
        method="bc",
        data={"batch_tokens": 1024},
        model=replace(_BASELINE_MODEL, width=1024),
        optimizer=OptimizerConfig(steps=100_000, learning_rate=1e-4),
    ),
    "bc10": Preset(
        "behaviour cloning of the best 10 % of the episodes",
        method="bc10",
        data={"batch_tokens": 1024},
        model=replace(_BASELINE_MODEL, width=1024),
        optimizer=OptimizerConfig(steps=100_000, learning_rate=1e-4),
    ),
}
"""By name; `scripts.train --help` lists them."""
