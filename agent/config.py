"""What a run is: nested frozen dataclasses, presets as values, JSON beside every checkpoint."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from data.packing import SLOTS, Packing

Method = Literal["at", "dt", "bc", "bc10"]
Positions = Literal["rotary", "learned"]
Memory = Literal["plain", "memory_efficient", "bpt", "ring"]


@dataclass(frozen=True)
class DataConfig:
    """Which episodes, and how batches are drawn from them.

    Attributes:
        store: folder of a packed episode store (see scripts.pack).
        tasks: tasks to relabel with; several tasks are hidden from the agent, one per chain.
        holdout: fraction of the episodes kept out of training, for evaluation contexts.
        trajectories: N, the most trajectories in a chain (method at).
        fixed: always N trajectories instead of n drawn anew for each batch (method at).
        top: fraction of the pool, best first, that a chain's last trajectory is drawn from
            (method at; 1 is the paper's uniform chain).
        window: K, steps in a window of a single episode (method dt).
        batch_tokens: tokens in a batch, about; the number of sequences follows from it.
    """

    store: Path
    tasks: tuple[str, ...]
    holdout: float = 0.2
    trajectories: int = 4
    fixed: bool = False
    top: float = 0.2
    window: int = 20
    batch_tokens: int = 2_000


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the network and of its sequence.

    Attributes:
        packing: tokens of a step: `step` one, `rsa` Decision Transformer's three, `rsar` four.
        chunk: environment steps in one step of the sequence; its actions run open loop.
        positions: how a token knows its trajectory's index in the chain: `rotary` rotates queries
            and keys, `learned` adds an embedding (learns to explore sooner on small budgets).
        previous_action: give a `step` token the action before it (hurts on small data).
        layers: transformer blocks, or hidden layers of a behaviour-cloning network.
        width: E, channels of the residual stream, or of each hidden layer.
        heads: attention heads; must divide width.
        dropout: fraction of each residual branch's outputs that training drops (at, dt).
        memory: `plain` dense attention, `memory_efficient` blockwise attention, `bpt` blockwise
            attention and feed-forward, `ring` bpt with the sequence sharded over mesh.ring.
        block_size: most tokens in a block of blockwise computation.
    """

    packing: Packing = "step"
    chunk: int = 1
    positions: Positions = "rotary"
    previous_action: bool = False
    layers: int = 2
    width: int = 64
    heads: int = 1
    dropout: float = 0.0
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
    """

    steps: int = 1_000
    learning_rate: float = 1e-3
    warmup: int = 50
    final_fraction: float = 0.1
    weight_decay: float = 1e-4
    clip: float = 1.0


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
        method: `at` Agentic Transformer, `dt` Decision Transformer, `bc` behaviour cloning,
            `bc10` behaviour cloning of the best 10 %.
        model: network.
        optimizer: updates.
        mesh: devices.
        seed: of parameters and batches.
        log_every: steps between log lines.
        checkpoint_every: steps between checkpoints; the last step always has one.
    """

    run: Path
    data: DataConfig
    method: Method = "at"
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    seed: int = 0
    log_every: int = 100
    checkpoint_every: int = 1_000

    def check(self) -> None:
        """Refuse settings that cannot work, before anything is compiled.

        Raises:
            ValueError: names the field, its value and a value that works.
        """
        model, mesh = self.model, self.mesh
        _positive("model", model, ("chunk", "layers", "width", "heads", "block_size"))
        _positive("mesh", mesh, ("data", "fsdp", "ring", "tensor"))
        _positive("data", self.data, ("trajectories", "window", "batch_tokens"))
        _positive("optimizer", self.optimizer, ("steps", "learning_rate", "clip"))
        _positive("config", self, ("log_every", "checkpoint_every"))
        if not 0 < self.data.top <= 1:
            raise ValueError(f"data.top={self.data.top} must lie in (0, 1]")
        if not 0 <= model.dropout < 1:
            raise ValueError(f"model.dropout={model.dropout} must lie in [0, 1)")
        if self.method in ("at", "dt"):
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
        elif mesh.devices != 1:
            raise ValueError(f"method={self.method} trains on one device, got a mesh of {mesh}")
        elif model.dropout:
            raise ValueError(
                f"method={self.method} has no residual branches to drop from, got "
                f"model.dropout={model.dropout}; use 0"
            )
        if self.method == "dt" and model.packing != "rsa":
            raise ValueError(
                f"method=dt reads (R̂, s, a): use model.packing=rsa, not {model.packing}"
            )
        if self.method == "at" and model.packing == "rsa":
            raise ValueError("method=at needs a reward token: use model.packing=step or rsar")
        if self.method != "at" and len(self.data.tasks) != 1:
            raise ValueError(
                f"method={self.method} takes one task, got data.tasks={self.data.tasks}"
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values, for config.json and checkpoints."""
        return dataclasses.asdict(self, dict_factory=lambda items: {k: _plain(v) for k, v in items})

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainConfig":
        """Inverse of `to_json`."""
        data = values["data"]
        return cls(
            run=Path(values["run"]),
            data=DataConfig(
                **{**data, "store": Path(data["store"]), "tasks": tuple(data["tasks"])}
            ),
            method=values["method"],
            model=ModelConfig(**values["model"]),
            optimizer=OptimizerConfig(**values["optimizer"]),
            mesh=MeshConfig(**values["mesh"]),
            **{name: values[name] for name in ("seed", "log_every", "checkpoint_every")},
        )

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
