"""What to change when a run does not fit: each change compiled, so that it is known to help."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agent import estimate
from agent.ahead import batch_shape
from agent.config import TRANSFORMERS, TrainConfig
from agent.plan import Plan, mesh_of, plan
from ring.targets import Target

_HOPELESS = 1.25
"""A change is not tried if the bytes it is counted to leave are so many times those there are."""


@dataclass(frozen=True)
class Change:
    """Another run, or another target for it.

    Attributes:
        config: of the run, changed.
        target: to run it on.
        note: what the flags do not tell.
    """

    config: TrainConfig
    target: Target
    note: str = ""

    def words(self, asked: TrainConfig, target: Target) -> str:
        """The flags that make this of what was asked for."""
        before, after = asked.to_json(), self.config.to_json()
        flags = [] if self.target == target else [f"--target {self.target}"]
        for group in ("data", "model", "optimizer", "mesh"):
            for name, value in after[group].items():
                if value != before[group][name]:
                    flags.append(f"--{group}.{name.replace('_', '-')} {value}")
        if self.config.evaluate_rollouts != asked.evaluate_rollouts:
            flags.append(f"--evaluate-rollouts {self.config.evaluate_rollouts}")
        return " ".join(flags) + (f", {self.note}" if self.note else "")


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
        yield Change(_with(config, model={"memory": "bpt"}), target)
    if transformer and mesh.ring < target.size:
        yield _ring(config, target)
    here = refused.rows // (mesh.data * mesh.fsdp * config.optimizer.accumulation)
    if here > 1:
        parts = here * config.optimizer.accumulation
        yield Change(_with(config, optimizer={"accumulation": parts}), target)
    if model.dtype == "float32" and transformer:
        note = "which halves the evaluation cache too" if config.method != "dt" else ""
        yield Change(_with(config, model={"dtype": "bfloat16"}), target, note)
    if transformer and target.platform != "cpu" and (larger := target.doubled()):
        yield _ring(config, larger)
    if config.method == "at" and model.packing in ("rsar", "rsard"):
        ratio = config.tokens_per_step
        shorter = _shorter(config, ratio, model={"packing": "step"})
        yield Change(shorter, target, f"{ratio} times fewer tokens")
    ratio = 2
    while config.method == "at" and (fewer := config.data.trajectories // ratio):
        yield Change(_shorter(config, ratio, data={"trajectories": fewer}), target)
        ratio *= 2


def _shorter(config: TrainConfig, ratio: int, **groups: dict[str, Any]) -> TrainConfig:
    """With batches shorter by a ratio as well: otherwise more chains would fill them."""
    tokens = {"batch_tokens": max(1, config.data.batch_tokens // ratio)}
    return _with(config, **{**groups, "data": {**tokens, **groups.get("data", {})}})


def _ring(config: TrainConfig, target: Target) -> Change:
    mesh = {"data": 1, "fsdp": 1, "ring": target.size, "tensor": 1}
    return Change(_with(config, model={"memory": "ring"}, mesh=mesh), target)


def _with(config: TrainConfig, **groups: dict[str, Any]) -> TrainConfig:
    """The config with some fields of some groups changed, for a new run."""
    groups = {"data": {}, **groups}
    groups["data"] = {"multiple": None, **groups["data"]}
    made = {
        name: dataclasses.replace(getattr(config, name), **fields)
        for name, fields in groups.items()
    }
    return dataclasses.replace(config, **made)
