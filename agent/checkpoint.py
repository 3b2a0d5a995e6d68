"""Whole checkpoints by Orbax: parameters, optimizer, step, config, normaliser, scales, versions.

There is no random-number or iterator state to save: batches and keys are functions of
(seed, step).
"""

import importlib.metadata
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agent import networks, optimizer
from agent.config import TrainConfig
from agent.sharding import state_sharding
from data.normalize import Normalizer

CONFIG = "config.json"
SCHEMA = 1
"""Raised whenever older checkpoints can no longer be read."""

_PACKAGES = ("exoring", "jax", "flax", "optax", "orbax-checkpoint", "dm-control", "mujoco", "numpy")


class TrainState(NamedTuple):
    """What training changes.

    Attributes:
        parameters: of the network.
        optimizer: moments and counts.
        step: int32 scalar, updates done.
    """

    parameters: nnx.State
    optimizer: Any
    step: jax.Array


@dataclass(frozen=True)
class Agent:
    """A trained network with all that acting needs.

    Attributes:
        config: of its training run.
        structure: of the network.
        parameters: of the network, on the mesh.
        normalizer: of observations.
        best_returns: by task, the raw return that stands for 1 in the network's inputs.
        mesh: where the parameters lie.
        step: updates done.
    """

    config: TrainConfig
    structure: nnx.GraphDef
    parameters: nnx.State
    normalizer: Normalizer
    best_returns: dict[str, float]
    mesh: Mesh
    step: int


def initial_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """Fresh parameters from the seed, created where they belong."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    make = jax.jit(lambda key: _state(config, key), out_shardings=shardings)
    return make(jax.random.key(config.seed))


def abstract_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """The state as shapes with shardings, for initialisation and restoring."""
    shapes = jax.eval_shape(lambda: _state(config, jax.random.key(0)))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_sharding(shapes, mesh),
    )


def _state(config: TrainConfig, key: jax.Array) -> TrainState:
    parameters = nnx.state(networks.network(config, key))
    moments = optimizer.make(config.optimizer).init(parameters)
    return TrainState(parameters, moments, jnp.zeros((), jnp.int32))


class Checkpoints:
    """The checkpoints of a run, newest two kept; saving is asynchronous and atomic."""

    def __init__(self, run: Path) -> None:
        logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax logs every file it touches
        self._run = run
        self._manager = ocp.CheckpointManager(
            folder(run),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(2)
            ),
        )

    def save(self, state: TrainState, config: TrainConfig, extra: dict[str, Any]) -> None:
        """Save at the state's step, unless that is already saved."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        meta = {"schema": SCHEMA, "step": step, "config": config.to_json(), **extra}
        meta["versions"] = {name: importlib.metadata.version(name) for name in _PACKAGES}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                parameters=ocp.args.StandardSave(state.parameters),
                optimizer=ocp.args.StandardSave(state.optimizer),
                meta=ocp.args.JsonSave(meta),
            ),
        )

    def restore(self, config: TrainConfig, mesh: Mesh) -> TrainState | None:
        """The newest state on this mesh, or None when nothing was saved yet.

        Raises:
            ValueError: the checkpoint is of another schema or config.
        """
        step = latest(self._run)
        if step is None:
            return None
        meta = _meta(self._manager, step, self._run)
        saved, asked = _flat(meta["config"]), _flat(config.to_json())
        differing = [name for name in asked if asked[name] != saved.get(name)]
        # The mesh may change between runs: the same state goes on elsewhere.
        differing = [name for name in differing if not name.startswith("mesh.") and name != "run"]
        if differing:
            changes = ", ".join(f"{name} {saved.get(name)} → {asked[name]}" for name in differing)
            raise ValueError(
                f"{self._run} holds a run with other settings ({changes}); "
                f"repeat its settings to resume it, or choose another --run"
            )
        target = abstract_state(config, mesh)
        items = self._manager.restore(
            step,
            args=ocp.args.Composite(
                parameters=ocp.args.StandardRestore(target.parameters),
                optimizer=ocp.args.StandardRestore(target.optimizer),
            ),
        )
        replicated = NamedSharding(mesh, PartitionSpec())
        count = jax.device_put(jnp.int32(step), replicated)
        return TrainState(items["parameters"], items["optimizer"], count)

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def folder(run: Path) -> Path:
    """Where a run keeps its checkpoints; absolute, as Orbax demands."""
    return (run / "checkpoints").resolve()


def latest(run: Path) -> int | None:
    """The newest step whose checkpoint was written completely."""
    steps = [
        int(path.name)
        for path in folder(run).glob("*")
        if path.name.isdigit() and (path / "_CHECKPOINT_METADATA").exists()
    ]
    return max(steps, default=None)


def read_config(run: Path) -> TrainConfig:
    """The config of a run, without starting JAX: its mesh may want simulated devices first.

    Raises:
        FileNotFoundError: the run was never trained to a checkpoint.
    """
    _newest(run)
    return TrainConfig.from_json(json.loads((run / CONFIG).read_text()))


def write_config(config: TrainConfig) -> None:
    """Keep a run's config beside its checkpoints."""
    config.run.mkdir(parents=True, exist_ok=True)
    unfinished = config.run / f".{CONFIG}"
    unfinished.write_text(json.dumps(config.to_json(), indent=2) + "\n")
    os.replace(unfinished, config.run / CONFIG)


def load(run: Path, config: TrainConfig, mesh: Mesh) -> Agent:
    """A run's newest network on a mesh.

    Args:
        run: folder of the run.
        config: `read_config(run)`, perhaps with another memory mode: parameters are the same.
        mesh: where the network is to act.

    Raises:
        FileNotFoundError: the run has no checkpoint.
        ValueError: the checkpoint is of another schema.
    """
    step = _newest(run)
    structure, target = networks.abstract_parameters(config, mesh)
    with ocp.CheckpointManager(folder(run)) as manager:
        meta = _meta(manager, step, run)
        items = manager.restore(
            step, args=ocp.args.Composite(parameters=ocp.args.StandardRestore(target))
        )
    return Agent(
        config=config,
        structure=structure,
        parameters=items["parameters"],
        normalizer=Normalizer.from_json(meta["normalizer"]),
        best_returns=meta["best_returns"],
        mesh=mesh,
        step=step,
    )


def _newest(run: Path) -> int:
    step = latest(run)
    if step is None:
        raise FileNotFoundError(
            f"no complete checkpoint in {folder(run)}; train it first: python -m scripts.train"
        )
    return step


def _meta(manager: ocp.CheckpointManager, step: int, run: Path) -> dict[str, Any]:
    meta = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
    if meta.get("schema") != SCHEMA:
        raise ValueError(
            f"checkpoint {step} in {run} has schema {meta.get('schema')}, this version of exoring "
            f"reads schema {SCHEMA}; retrain it, or use the exoring that wrote it"
        )
    return meta


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat
