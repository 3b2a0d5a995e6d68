"""Whole checkpoints by Orbax: parameters, optimizer, step, config, normaliser, scales, versions.

There is no random-number or iterator state to save: batches and keys are functions of
(seed, step), and neither knows the mesh. So a run goes on bitwise as if it had never stopped, and
up to rounding on any other mesh or number of processes.

What a run begins with, the first of these that there is:
    1. its own newest complete checkpoint,
    2. the parameters of the run named by ``start_from``, at step 0,
    3. fresh parameters from its seed.
"""

import dataclasses
import importlib.metadata
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from agent import networks, optimizer
from agent.config import TrainConfig
from agent.sharding import named_leaves, with_shardings
from data.normalize import Normalizer
from exorl import EpisodeStore, task
from exorl.paths import write_whole

CONFIG = "config.json"
SCHEMA = 2
"""Raised whenever older checkpoints can no longer be read."""

_WRITTEN = "_CHECKPOINT_METADATA"
"""The file by which Orbax says that a checkpoint is complete, and when it was begun."""

_PACKAGES = ("exoring", "jax", "flax", "optax", "orbax-checkpoint", "dm-control", "mujoco", "numpy")

_MAY_CHANGE = ("run", "mesh", "data.store", "data.multiple", "model.memory", "model.block_size")
_MAY_CHANGE += ("log_every", "checkpoint_every", "evaluate_every", "evaluate_rollouts")
_MAY_CHANGE += ("require", "profile", "start_from")
"""Settings and groups of them that a resumed run need not repeat: they leave the result alone."""


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
    make = jax.jit(
        lambda key: _state(config, key),
        out_shardings=shardings,
        # It runs once: optimising it would take longer.
        compiler_options={"xla_backend_optimization_level": 0},
    )
    return make(jax.random.key(config.seed))


def fresh_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """The state of step 0: fresh parameters, or those of the run in ``start_from``.

    Raises:
        ValueError: that run's network has other parameters.
    """
    state = initial_state(config, mesh)
    if config.start_from is None:
        return state
    trees = [
        networks.abstract_parameters(each, mesh)[1]
        for each in (read_config(config.start_from), config)
    ]
    theirs, ours = ({n: leaf.shape for n, leaf in named_leaves(tree)} for tree in trees)
    differing = [n for n in {**theirs, **ours} if theirs.get(n) != ours.get(n)]
    if differing:
        name = differing[0]
        raise ValueError(
            f"start_from={config.start_from} has other parameters: {name} is "
            f"{theirs.get(name, 'absent')} there and {ours.get(name, 'absent')} here; "
            f"repeat its model.* settings and data.trajectories"
        )
    return state._replace(parameters=load(config.start_from, config, mesh).parameters)


def abstract_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """The state as shapes with shardings, for initialisation and restoring."""
    return with_shardings(jax.eval_shape(lambda: _state(config, jax.random.key(0))), mesh)


def _state(config: TrainConfig, key: jax.Array) -> TrainState:
    parameters = nnx.state(networks.network(config, key))
    moments = optimizer.make(config.optimizer).init(parameters)
    return TrainState(parameters, moments, jnp.zeros((), jnp.int32))


class Checkpoints:
    """The checkpoints of a run, the newest two and the best; saving is asynchronous and atomic."""

    def __init__(self, run: Path) -> None:
        logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax logs every file it touches
        self._run = run
        keep = ocp.checkpoint_managers
        policy = keep.AnyPreservationPolicy(
            [keep.LatestN(2), keep.BestN(n=1, get_metric_fn=_score)]
        )
        self._manager = ocp.CheckpointManager(
            folder(run),
            # Without best_fn Orbax would not write down the scores that the policy ranks by.
            options=ocp.CheckpointManagerOptions(preservation_policy=policy, best_fn=_score),
        )

    def save(
        self,
        state: TrainState,
        step: int,
        config: TrainConfig,
        extra: dict[str, Any],
        score: float | None = None,
    ) -> None:
        """Save at a step, unless that is already saved; the highest score is kept longest."""
        if step in self._manager.all_steps():
            return
        meta = {"schema": SCHEMA, "step": step, "config": config.to_json(), **extra}
        meta["observation"] = observation_layout(config)
        meta["versions"] = {name: importlib.metadata.version(name) for name in _PACKAGES}
        self._manager.save(
            step,
            metrics={"score": score},
            args=ocp.args.Composite(
                parameters=ocp.args.StandardSave(state.parameters),
                optimizer=ocp.args.StandardSave(state.optimizer),
                meta=ocp.args.JsonSave(meta),
            ),
        )

    def resumed(self, config: TrainConfig, fingerprint: str) -> TrainConfig:
        """The config to go on with, or `config` as it is when nothing was saved yet.

        Raises:
            ValueError: the checkpoint is of another schema, config, observation or data.
        """
        step = latest(self._run)
        if step is None:
            return config.resolved()
        meta = _meta(self._manager, step, self._run)
        saved, asked = _flat(meta["config"]), _flat(config.to_json())
        differing = [
            name
            for name in asked
            if asked[name] != saved.get(name)
            and not any(name == may or name.startswith(f"{may}.") for may in _MAY_CHANGE)
        ]
        if differing:
            changes = ", ".join(f"{name} {saved.get(name)} → {asked[name]}" for name in differing)
            raise ValueError(
                f"{self._run} holds a run with other settings ({changes}); "
                f"repeat its settings to resume it, or choose another --run"
            )
        if meta["store_fingerprint"] != fingerprint:
            raise ValueError(
                f"{self._run} was trained on other episodes than those in {config.data.store}; "
                f"give its store ({saved['data.store']}), or choose another --run"
            )
        multiple = meta["config"]["data"]["multiple"]
        data = dataclasses.replace(config.data, multiple=multiple)
        going_on = dataclasses.replace(config, data=data)
        going_on.check()
        return going_on

    def restore(self, config: TrainConfig, mesh: Mesh) -> TrainState | None:
        """The newest state on this mesh, or None when nothing was saved yet."""
        step = latest(self._run)
        if step is None:
            return None
        target = abstract_state(config, mesh)
        items = self._manager.restore(
            step,
            args=ocp.args.Composite(
                parameters=ocp.args.StandardRestore(target.parameters),
                optimizer=ocp.args.StandardRestore(target.optimizer),
            ),
        )
        count = jax.jit(lambda: jnp.int32(step), out_shardings=target.step.sharding)()
        return TrainState(items["parameters"], items["optimizer"], count)

    def close(self) -> None:
        """Wait until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def folder(run: Path) -> Path:
    """Where a run keeps its checkpoints; absolute, as Orbax demands."""
    return (run / "checkpoints").resolve()


def steps(run: Path) -> list[int]:
    """The steps whose checkpoints were written completely, ascending."""
    return sorted(
        int(path.name)
        for path in folder(run).glob("*")
        if path.name.isdigit() and (path / _WRITTEN).exists()
    )


def latest(run: Path) -> int | None:
    """The newest step whose checkpoint was written completely."""
    return max(steps(run), default=None)


def best(run: Path) -> int | None:
    """The step with the highest score, None if no evaluation was saved."""
    files = {step: folder(run) / str(step) / "metrics" / "metrics" for step in steps(run)}
    scores = {step: _score(json.loads(file.read_text())) for step, file in files.items()}
    evaluated = [step for step in scores if scores[step] > -math.inf]
    return max(evaluated, key=lambda step: scores[step], default=None)


def _score(metrics: dict[str, float | None]) -> float:
    score = metrics["score"]
    return -math.inf if score is None else score


def numbered(run: Path, step: int | Literal["newest", "best"]) -> int:
    """The step that is meant.

    Raises:
        FileNotFoundError: the run has no such checkpoint.
    """
    if step == "newest":
        return _newest(run)
    if step == "best":
        found = best(run)
        if found is None:
            raise FileNotFoundError(
                f"no evaluated checkpoint in {run}; train with --evaluate-every, or take the newest"
            )
        return found
    return step


def identity(run: Path, step: int) -> str:
    """What tells the parameters of a checkpoint from all others: its step and when it was saved."""
    saved = json.loads((folder(run) / str(step) / _WRITTEN).read_text())
    return f"{step}@{saved['init_timestamp_nsecs']}"


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
    text = json.dumps(config.to_json(), indent=2) + "\n"
    write_whole(config.run / CONFIG, text.encode())


def load(run: Path, config: TrainConfig, mesh: Mesh, step: int | None = None) -> Agent:
    """A run's network on a mesh.

    Args:
        run: folder of the run.
        config: `read_config(run)`, perhaps with another memory mode: parameters are the same.
        mesh: where the network is to act.
        step: of the checkpoint, by default the newest.

    Raises:
        FileNotFoundError: the run has no such checkpoint.
        ValueError: the checkpoint is of another schema or observation.
    """
    step = _newest(run) if step is None else step
    if step not in steps(run):
        raise FileNotFoundError(f"{run} has no checkpoint of step {step}, only of {steps(run)}")
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


def check_episodes(run: Path, step: int, store: EpisodeStore) -> None:
    """Refuse episodes other than those a checkpoint was trained on, wherever they lie.

    Raises:
        ValueError: the store holds others.
    """
    with ocp.CheckpointManager(folder(run)) as manager:
        trained_on = _meta(manager, step, run)["store_fingerprint"]
    if trained_on != store.fingerprint:
        raise ValueError(
            f"{run} was trained on other episodes than those in {store.path}, which contexts and "
            f"targets would be taken from (fingerprint {trained_on} there, {store.fingerprint} "
            f"here); put its episodes back, or train on these with another --run"
        )


def observation_layout(config: TrainConfig) -> str:
    """What a network of this config reads and does, in words that are compared."""
    info = task(config.data.tasks[0])
    return (
        f"{info.domain}: {info.observation_dim} observations in dm_control's order, "
        f"{info.action_dim} actions"
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
    here = observation_layout(TrainConfig.from_json(meta["config"]))
    if meta["observation"] != here:
        raise ValueError(
            f"checkpoint {step} in {run} is of {meta['observation']}; this version of exoring has "
            f"{here}; retrain it, or use the exoring that wrote it"
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
