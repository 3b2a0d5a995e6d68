"""What to change when a run does not fit: each change compiled, so that it is known to help."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agent import estimate
from agent.ahead import batch_shape
from agent.config import TRANSFORMERS, MeshConfig, TrainConfig
from agent.plan import Plan, mesh_of, plan
from ring.targets import Target

_HOPELESS = 1.25
"""A change is not tried if the bytes it is counted to leave are so many times those there are."""


@dataclass(frozen=True)
class Change:
    """Another run, or another target for it.

    Attributes:
        words: what is changed, as flags.
        config: of the run, changed.
        target: to run it on.
    """

    words: str
    config: TrainConfig
    target: Target


def suggestions(refused: Plan, efficiency: float) -> Iterator[tuple[Change, Plan]]:
    """Plans of changed runs, those that change least first; some fit, and some still do not."""
    for change in changes(refused):
        if _possible(change) and _hopeful(refused, change):
            yield change, plan(change.config, change.target, efficiency=efficiency)


def _possible(change: Change) -> bool:
    try:
        change.config.check()
    except ValueError:
        return False
    return True


def _hopeful(refused: Plan, change: Change) -> bool:
    """Whether the total would come near what there is if it shrank as what is counted does."""
    rows, steps = batch_shape(change.config)
    mesh = mesh_of(change.config, change.target)
    counted = estimate.bytes_of(change.config, mesh, rows, steps).total
    total = refused.total or refused.counted.total
    return total * counted / refused.counted.total <= _HOPELESS * refused.available


def changes(refused: Plan) -> Iterator[Change]:
    """All changes there are to try, one at a time."""
    config, target = refused.config, refused.target
    model, mesh = config.model, config.mesh
    transformer = config.method in TRANSFORMERS
    if model.memory in ("plain", "memory_efficient") and transformer:
        yield Change("--model.memory bpt", _with(config, model={"memory": "bpt"}), target)
    if transformer and mesh.ring < target.size:
        yield _ring(config, target, f"--model.memory ring --mesh.ring {target.size}")
    here = refused.rows // (mesh.data * mesh.fsdp * config.optimizer.accumulation)
    if here > 1:
        parts = here * config.optimizer.accumulation
        words = f"--optimizer.accumulation {parts}"
        yield Change(words, _with(config, optimizer={"accumulation": parts}), target)
    if model.dtype == "float32":
        words = "--model.dtype bfloat16, which halves the evaluation cache too"
        yield Change(words, _with(config, model={"dtype": "bfloat16"}), target)
    if transformer and target.platform != "cpu":
        larger = target.doubled()
        words = f"--target {larger} --model.memory ring --mesh.ring {larger.size}"
        yield _ring(config, larger, words)
    if config.method == "at" and model.packing in ("rsar", "rsard"):
        ratio = config.tokens_per_step
        words = f"--model.packing step{_flag(config, ratio)}, {ratio} times fewer tokens"
        yield Change(words, _shorter(config, ratio, model={"packing": "step"}), target)
    ratio = 2
    while config.method == "at" and (fewer := config.data.trajectories // ratio):
        words = f"--data.trajectories {fewer}{_flag(config, ratio)}"
        yield Change(words, _shorter(config, ratio, data={"trajectories": fewer}), target)
        ratio *= 2


def _shorter(config: TrainConfig, ratio: int, **groups: dict[str, Any]) -> TrainConfig:
    """With batches shorter by a ratio as well: otherwise more chains would fill them."""
    tokens = {"batch_tokens": max(1, config.data.batch_tokens // ratio)}
    return _with(config, **{**groups, "data": {**tokens, **groups.get("data", {})}})


def _flag(config: TrainConfig, ratio: int) -> str:
    return f" --data.batch-tokens {max(1, config.data.batch_tokens // ratio)}"


def _ring(config: TrainConfig, target: Target, words: str) -> Change:
    changed = _with(config, model={"memory": "ring"})
    return Change(words, dataclasses.replace(changed, mesh=MeshConfig(ring=target.size)), target)


def _with(config: TrainConfig, **groups: dict[str, Any]) -> TrainConfig:
    """The config with some fields of some groups changed, for a new run."""
    groups = {"data": {}, **groups}
    groups["data"] = {"multiple": None, **groups["data"]}
    made = {
        name: dataclasses.replace(getattr(config, name), **fields)
        for name, fields in groups.items()
    }
    return dataclasses.replace(config, **made)
