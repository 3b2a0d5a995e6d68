"""What a run is: nested frozen dataclasses, presets as values, JSON beside every checkpoint."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from data.hindsight import ContextOrder, Relabel
from data.packing import SLOTS, LossOn, Packing

Method = Literal["at", "dt", "dt_long", "bc", "bc10"]
Positions = Literal["rotary", "learned", "timestep", "global"]
Memory = Literal["plain", "memory_efficient", "bpt", "ring"]
Dtype = Literal["float32", "bfloat16"]
Platform = Literal["cpu", "gpu", "tpu"]

TRANSFORMERS: tuple[Method, ...] = ("at", "dt", "dt_long")

PROFILED_STEPS = range(10, 15)
"""Counted from the first of a start: compilation is over by then."""


@dataclass(frozen=True)
class DataConfig:
    """Which episodes, and how batches are drawn from them.

    Attributes:
        store: folder of a packed episode store (see scripts.pack).
        tasks: tasks to relabel with; several tasks are hidden from the agent, one per chain.
        holdout: fraction of the episodes kept out of training, for evaluation.
        trajectories: N, the most trajectories in a chain (method at).
        fixed: always N trajectories instead of n drawn anew for each batch (method at).
        top: fraction of the pool, best first, that a chain's last trajectory is drawn from
            (method at; 1 is the paper's uniform chain).
        relabel: target return of a chain's trajectories: `best` the chain's best for all of them
            (hindsight), `own` each its own (method at).
        context: order of all trajectories but the best, which is always last (method at).
        loss_on: whose actions are learned: those of the `last`, the best, trajectory, or of `all`
            (method at).
        index_range: tell the network trajectory indices that are a sorted random subset of
            0…index_range−1, so that it can act in chains that long; by default 0…n−1 (method at).
        window: K, steps in a window of a single episode (method dt).
        batch_tokens: tokens in a batch, about; the number of sequences follows from it.
        multiple: the number of sequences is a multiple of it. By default mesh.data × mesh.fsdp ×
            optimizer.accumulation when the run begins; a resumed run keeps it, wherever it runs.
    """

    store: Path
    tasks: tuple[str, ...]
    holdout: float = 0.2
    trajectories: int = 4
    fixed: bool = False
    top: float = 0.2
    relabel: Relabel = "best"
    context: ContextOrder = "ascending"
    loss_on: LossOn = "last"
    index_range: int | None = None
    window: int = 20
    batch_tokens: int = 2_000
    multiple: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the network and of its sequence.

    Attributes:
        packing: tokens of a step: `step` one, `rsa` Decision Transformer's three, `rsar` four with
            the reward, `rsard` five with the completion flag.
        chunk: environment steps in one step of the sequence; its actions run open loop.
        positions: what a token knows beside its step within the trajectory: `rotary` rotates
            queries and keys by the trajectory's index in the chain, `learned` adds an embedding of
            it (learns to explore sooner on small budgets), `global` rotates by the step's index in
            the chain, `timestep` nothing.
        reward_token: give a `step` token the reward before it (for more tokens, packing tells).
        completion: give a `step` token the completion flag before it.
        previous_action: give a `step` token the action before it (hurts on small data).
        cross_episode: attend to the trajectories before; without, each is alone.
        layers: transformer blocks, or hidden layers of a behaviour-cloning network.
        width: E, channels of the residual stream, or of each hidden layer.
        heads: attention heads; must divide width.
        dropout: fraction of each residual branch's outputs that training drops (transformers).
        dtype: of the blocks' computation. Parameters, returns, rewards and indices up to the
            embedding, statistics and the loss are float32 in any case.
        memory: `plain` dense attention, `memory_efficient` blockwise attention, `bpt` blockwise
            attention and feed-forward, `ring` bpt with the sequence sharded over mesh.ring.
        block_size: most tokens in a block of blockwise computation.
    """

    packing: Packing = "step"
    chunk: int = 1
    positions: Positions = "rotary"
    reward_token: bool = True
    completion: bool = False
    previous_action: bool = False
    cross_episode: bool = True
    layers: int = 2
    width: int = 64
    heads: int = 1
    dropout: float = 0.0
    dtype: Dtype = "float32"
    memory: Memory = "ring"
    block_size: int = 512


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up, cosine decay and clipping by global norm.

    Attributes:
        steps: updates in a run.
        learning_rate: peak.
        warmup: steps of linear warm-up.
        final_fraction: learning rate of the last step over the peak.
        weight_decay: decoupled, on every parameter.
        clip: largest global norm of the gradient.
        accumulation: parts of a batch whose gradients are computed one after the other, which
            divides activation memory by it where a device has several sequences.
    """

    steps: int = 1_000
    learning_rate: float = 1e-3
    warmup: int = 50
    final_fraction: float = 0.1
    weight_decay: float = 1e-4
    clip: float = 1.0
    accumulation: int = 1


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the device mesh; a laptop is 1 × 1 × 1 × 1.

    Attributes:
        data: chains are split over it.
        fsdp: chains, large parameters and their optimizer state are split over it.
        ring: the sequence is split over it; key/value blocks travel around it.
        tensor: heads are split over it.
        simulated: split the CPU into as many simulated devices as the mesh has.
    """

    data: int = 1
    fsdp: int = 1
    ring: int = 1
    tensor: int = 1
    simulated: bool = False

    @property
    def devices(self) -> int:
        """Devices in the mesh."""
        return self.data * self.fsdp * self.ring * self.tensor


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Attributes:
        run: folder of the run: config.json, metrics.jsonl, TensorBoard events, checkpoints.
        data: episodes and batches.
        method: `at` Agentic Transformer, `dt` Decision Transformer on windows, `dt_long` on whole
            episodes, `bc` behaviour cloning, `bc10` behaviour cloning of the best 10 %.
        model: network.
        optimizer: updates.
        mesh: devices.
        seed: of parameters and batches.
        start_from: another run, whose newest parameters this one begins with.
        log_every: steps between log lines.
        checkpoint_every: steps between checkpoints; the last step always has one.
        evaluate_every: steps between evaluations (held-out action error, and rollouts); 0: none.
        evaluate_rollouts: chains rolled out for each task by an evaluation; 0: none.
        require: refuse to run on anything but this, instead of training slowly on a CPU.
        profile: record a trace of `PROFILED_STEPS` for TensorBoard, in the run's folder.
    """

    run: Path
    data: DataConfig
    method: Method = "at"
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    seed: int = 0
    start_from: Path | None = None
    log_every: int = 100
    checkpoint_every: int = 1_000
    evaluate_every: int = 0
    evaluate_rollouts: int = 0
    require: Platform | None = None
    profile: bool = False

    def check(self) -> None:
        """Refuse settings that cannot work, before anything is compiled.

        Raises:
            ValueError: names the field, its value and a value that works.
        """
        model, mesh = self.model, self.mesh
        _positive("model", model, ("chunk", "layers", "width", "heads", "block_size"))
        _positive("mesh", mesh, ("data", "fsdp", "ring", "tensor"))
        _positive("data", self.data, ("trajectories", "window", "batch_tokens"))
        _positive("optimizer", self.optimizer, ("steps", "learning_rate", "clip", "accumulation"))
        _positive("config", self, ("log_every", "checkpoint_every"))
        for name in ("evaluate_every", "evaluate_rollouts"):
            if getattr(self, name) < 0:
                raise ValueError(f"config.{name}={getattr(self, name)} must not be negative")
        if not 0 < self.data.top <= 1:
            raise ValueError(f"data.top={self.data.top} must lie in (0, 1]")
        if not 0 <= model.dropout < 1:
            raise ValueError(f"model.dropout={model.dropout} must lie in [0, 1)")
        if len(set(self.data.tasks)) != len(self.data.tasks):
            raise ValueError(f"data.tasks={self.data.tasks} names a task twice; name each once")
        if self.profile and self.optimizer.steps < PROFILED_STEPS.stop:
            raise ValueError(
                f"profile traces steps {PROFILED_STEPS.start} to {PROFILED_STEPS[-1]}, which "
                f"optimizer.steps={self.optimizer.steps} has not all; use at least "
                f"{PROFILED_STEPS.stop}"
            )
        self._check_evaluation()
        self._check_batch()
        self._check_method()
        if self.method in TRANSFORMERS:
            self._check_transformer()

    def _check_evaluation(self) -> None:
        rollouts, shards = self.evaluate_rollouts, self.mesh.data * self.mesh.fsdp
        if self.method in TRANSFORMERS and rollouts % shards:
            raise ValueError(
                f"evaluate_rollouts={rollouts} do not divide over mesh.data × mesh.fsdp = "
                f"{shards}; use {-(-rollouts // shards) * shards}"
            )
        if rollouts and not self.evaluate_every:
            raise ValueError(
                f"evaluate_rollouts={rollouts} are part of evaluations, of which there are none; "
                f"set evaluate_every, or evaluate_rollouts=0"
            )
        if self.evaluate_every and not self.data.holdout:
            raise ValueError(
                f"evaluate_every={self.evaluate_every} measures errors on held-out episodes, and "
                f"data.holdout=0 holds out none; hold some out, or use evaluate_every=0"
            )

    def _check_batch(self) -> None:
        parts = self.mesh.data * self.mesh.fsdp * self.optimizer.accumulation
        if self.data.multiple is not None and (
            self.data.multiple < 1 or self.data.multiple % parts
        ):
            raise ValueError(
                f"data.multiple={self.data.multiple} sequences do not divide over mesh.data × "
                f"mesh.fsdp × optimizer.accumulation = {parts}; change these, or begin a new run"
            )
        indices = self.data.index_range
        if indices is not None and indices < self.data.trajectories:
            raise ValueError(
                f"data.index_range={indices} has too few indices for data.trajectories="
                f"{self.data.trajectories}; use at least as many"
            )

    def _check_method(self) -> None:
        model, mesh = self.model, self.mesh
        if self.method not in TRANSFORMERS and mesh.ring * mesh.tensor != 1:
            raise ValueError(
                f"method={self.method} has no sequence to shard, got mesh.ring={mesh.ring} and "
                f"mesh.tensor={mesh.tensor}; use 1 for both, and mesh.data"
            )
        if self.method not in TRANSFORMERS and model.dropout:
            raise ValueError(
                f"method={self.method} has no residual branches to drop from, got "
                f"model.dropout={model.dropout}; use 0"
            )
        if self.method not in TRANSFORMERS and model.dtype != "float32":
            raise ValueError(
                f"method={self.method} computes in float32, got model.dtype={model.dtype}"
            )
        if self.method in ("dt", "dt_long") and model.packing != "rsa":
            raise ValueError(
                f"method={self.method} reads (R̂, s, a): use model.packing=rsa, not {model.packing}"
            )
        if model.packing != "step":
            defaults = {"reward_token": True, "completion": False, "previous_action": False}
            for name, default in defaults.items():
                if getattr(model, name) != default:
                    raise ValueError(
                        f"model.{name}={not default} is for model.packing=step; the others have a "
                        f"token for the action, rsar for the reward too, and rsard for the "
                        f"completion flag as well"
                    )
        if self.method != "at" and len(self.data.tasks) != 1:
            raise ValueError(
                f"method={self.method} takes one task, got data.tasks={self.data.tasks}"
            )

    def _check_transformer(self) -> None:
        model, mesh = self.model, self.mesh
        if model.width % (4 * model.heads):
            raise ValueError(
                f"model.width={model.width} over model.heads={model.heads} must be a multiple "
                f"of 4 channels a head (half of them rotate in pairs); "
                f"use a width of {4 * model.heads * max(1, model.width // (4 * model.heads))}"
            )
        if model.heads % mesh.tensor:
            raise ValueError(
                f"model.heads={model.heads} is not divisible by mesh.tensor={mesh.tensor}; "
                f"use mesh.tensor=1 or a divisor of the heads"
            )
        if mesh.ring > 1 and model.memory != "ring":
            raise ValueError(
                f"model.memory={model.memory} keeps the sequence whole, but "
                f"mesh.ring={mesh.ring} shards it; use model.memory=ring or mesh.ring=1"
            )

    def resolved(self) -> "TrainConfig":
        """The same with `data.multiple` set, so that batches no longer depend on the mesh."""
        if self.data.multiple is not None:
            return self
        parts = self.mesh.data * self.mesh.fsdp * self.optimizer.accumulation
        return dataclasses.replace(self, data=dataclasses.replace(self.data, multiple=parts))

    def to_json(self) -> dict[str, Any]:
        """Plain values, for config.json and checkpoints."""
        return dataclasses.asdict(self, dict_factory=lambda items: {k: _plain(v) for k, v in items})

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainConfig":
        """Inverse of `to_json`."""
        data, start = values["data"], values["start_from"]
        groups = {
            "data": DataConfig(
                **{**data, "store": Path(data["store"]), "tasks": tuple(data["tasks"])}
            ),
            "model": ModelConfig(**values["model"]),
            "optimizer": OptimizerConfig(**values["optimizer"]),
            "mesh": MeshConfig(**values["mesh"]),
        }
        paths = {"run": Path(values["run"]), "start_from": Path(start) if start else None}
        return cls(**{**values, **groups, **paths})

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step of the sequence becomes."""
        return len(SLOTS[self.model.packing])


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _positive(group: str, config: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{group}.{name}={getattr(config, name)} must be positive")
