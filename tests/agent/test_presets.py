"""The presets are those of the guide, and each task's script carries its task's settings."""

import importlib
from pathlib import Path

import pytest

from agent.config import TRANSFORMERS
from agent.presets import PRESETS
from data.packing import SLOTS, steps_in
from exorl import home
from scripts import train

GUIDE = Path(__file__).parent.parent.parent / "docs" / "training.md"
HEADER = (
    *("preset", "method", "packing", "layers × width × heads", "N", "tokens", "tokens a batch"),
    *("updates", "peak rate", "mesh", "other"),
)
PAPER = {  # layers, width, heads, N, packing of the design
    "at_paper": (3, 128, 1, 4, "rsard"),
    "at_step": (3, 128, 1, 32, "step"),
    "at_bpt_32": (24, 1024, 16, 32, "rsar"),
    "at_ring_128": (24, 1024, 16, 128, "rsar"),
    "at_small_128": (3, 128, 1, 128, "rsar"),
    "at_step_128": (12, 768, 6, 128, "step"),
}


def row(name: str) -> tuple[str, ...]:
    """A preset as the guide's table has it."""
    preset = PRESETS[name]
    config = preset.config(run=Path("r"), store=Path("s"), tasks=("walker_run",))
    model, data, mesh = config.model, config.data, config.mesh
    transformer = config.method in TRANSFORMERS
    steps = {"at": data.trajectories * steps_in(1000, model.chunk), "dt": data.window}
    longest = steps.get(config.method, steps_in(1000, model.chunk) if transformer else 1)
    axes = [
        f"{axis} {size}"
        for axis in ("data", "fsdp", "ring", "tensor")
        if (size := getattr(mesh, axis)) > 1
    ]
    other = []
    if model.chunk > 1:
        other.append(f"chunk {model.chunk}")
    if config.method == "at":
        other.append(("n = N" if data.fixed else "n drawn") + f", top {data.top:g}")
    if model.dropout:
        other.append(f"dropout {model.dropout:g}")
    if model.dtype != "float32":
        other.append(model.dtype)
    if config.optimizer.accumulation > 1:
        other.append(f"{config.optimizer.accumulation} parts a batch")
    return (
        f"`{name}`",
        config.method,
        model.packing if transformer else "",
        f"{model.layers} × {model.width}" + (f" × {model.heads}" if transformer else ""),
        str(data.trajectories) if config.method == "at" else "",
        f"{longest * len(SLOTS[model.packing]):,}" if transformer else "",
        f"{data.batch_tokens:,}",
        f"{config.optimizer.steps:,}",
        f"{config.optimizer.learning_rate:g}",
        ", ".join(axes),
        ", ".join(other),
    )


def test_the_guide_lists_every_preset_as_it_is():
    section = GUIDE.read_text().split("## Presets")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    header, _, *listed = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines]
    assert header == HEADER
    assert listed == [*map(row, PRESETS)]


@pytest.mark.parametrize("name", PAPER)
def test_presets_are_those_of_the_design(name):
    config = PRESETS[name].config(run=Path("r"), store=Path("s"), tasks=("walker_run",))
    model = config.model
    found = (model.layers, model.width, model.heads, config.data.trajectories, model.packing)
    assert found == PAPER[name]


def test_the_papers_hyperparameters():
    config = PRESETS["at_paper"].config(run=Path("r"), store=Path("s"), tasks=("walker_run",))
    assert config.data.batch_tokens == 64 * 4 * 1000 * 5 and config.data.fixed
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.clip) == (1e-4, 1e-4, 0.25)
    assert (config.model.dropout, config.data.top) == (0.1, 1.0)


@pytest.mark.parametrize(
    ("task", "domain"),
    [
        ("walker_stand", "walker"),
        ("walker_walk", "walker"),
        ("walker_run", "walker"),
        ("cheetah_run", "cheetah"),
        ("jaco_reach_top_left", "jaco"),
        ("cartpole_swingup", "cartpole"),
    ],
)
def test_each_tasks_script_knows_its_data_and_folders(task, domain):
    script = importlib.import_module(f"scripts.train_{task}")
    assert task == script.TASK
    config = train.parse(["at_ring_128", "--mesh.ring", "4"], task=script.TASK)
    assert config.data.tasks == (task,)
    assert config.data.store == home() / "stores" / f"{domain}-exorl8"
    assert config.run == Path("runs") / task / "at_ring_128"
    assert config.mesh.ring == 4
    for said in ("at_ring_128 --require gpu", "--mix exorl8", "Hardware", "score"):
        assert said in (script.__doc__ or "")
