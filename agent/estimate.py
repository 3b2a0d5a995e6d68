"""What a training step takes by count: bytes, operations and seconds, before any compiler is asked.

Bytes are those of one device. What the step is handed is exact; gradients, activations and what is
in flight are estimates from the shapes that the blocks make (`agent.model`, `ring.blockwise`), and
the compiler's figures stand beside them in a plan (`agent.plan`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

import ring
from agent import cache, checkpoint, networks
from agent.ahead import abstract_batch
from agent.config import TRANSFORMERS, TrainConfig
from agent.sharding import shard_bytes


@dataclass(frozen=True)
class Bytes:
    """Of one device.

    Attributes:
        parameters: exact, in shards.
        moments: of the optimizer, exact, in shards.
        batch: exact.
        gradients: in shards, as large as the parameters.
        kept: activations from the forward pass for the backward pass: every block's input, and
            the output and log-sum-exp of its attention.
        working: what one block computes with: queries, keys and values, their gradients, scores
            or hidden units where they exist whole, the block's gathered parameters.
        in_flight: keys, values and gradients on their way around the ring.
    """

    parameters: int
    moments: int
    batch: int
    gradients: int
    kept: int
    working: int
    in_flight: int

    @property
    def arguments(self) -> int:
        """What the step is handed."""
        return self.parameters + self.moments + self.batch

    @property
    def total(self) -> int:
        """All of it."""
        return self.arguments + self.gradients + self.kept + self.working + self.in_flight


def bytes_of(config: TrainConfig, mesh: Mesh, rows: int, steps: int) -> Bytes:
    """Of a training step on B = rows chains of S = steps steps, padding included."""
    state = checkpoint.abstract_state(config, mesh)
    parameters = shard_bytes(state.parameters)
    kept, working, in_flight = _activations(config, rows, steps)
    return Bytes(
        parameters=parameters,
        moments=shard_bytes(state.optimizer) + shard_bytes(state.step),
        batch=shard_bytes(abstract_batch(config, mesh, rows, steps)),
        gradients=parameters,
        kept=kept,
        working=working,
        in_flight=in_flight,
    )


def _activations(config: TrainConfig, rows: int, steps: int) -> tuple[int, int, int]:
    """Bytes kept, of one block's working set, and in flight."""
    model, mesh = config.model, config.mesh
    here = rows // (mesh.data * mesh.fsdp * config.optimizer.accumulation)
    if config.method not in TRANSFORMERS:
        return 4 * here * model.layers * model.width, 0, 0  # hidden units
    tokens = here * steps * config.tokens_per_step // mesh.ring
    size, whole = np.dtype(model.dtype).itemsize, tokens * model.width
    split = whole // mesh.tensor  # by heads
    heads = model.heads // mesh.tensor
    kept = model.layers * (whole * size + split * size + tokens * heads * 4)
    # In their own type: the block's input as it is and normalised, queries, keys and values, the
    # same in blocks, their gradients, the output and its gradient. In float32: the gradients of
    # queries, keys and values, and around a ring those that arrive and the sum.
    working = 2 * whole * size + 11 * split * size + 3 * split * 4
    working += 2 * 2 * split * 4 if mesh.ring > 1 else 0
    working += 12 * model.width**2 * size // mesh.tensor
    if model.memory == "plain":
        working += 3 * 4 * here * heads * (tokens // max(here, 1)) ** 2
    if model.memory in ("plain", "memory_efficient"):
        working += 2 * 4 * split * size
    in_flight = split * (2 * size + 8) if mesh.ring > 1 else 0
    return kept, working, in_flight


def cache_bytes(config: TrainConfig, dtype: str) -> int:
    """Keys and values of N trajectories when acting, for one chain in each data × fsdp shard.

    Methods other than at act in one trajectory.
    """
    model, mesh = config.model, config.mesh
    trajectories = config.data.trajectories if config.method == "at" else 1
    steps = trajectories * networks.dimensions(config).timesteps
    held = cache.capacity(steps, config.tokens_per_step, mesh.ring) // mesh.ring
    return 2 * model.layers * held * model.width // mesh.tensor * np.dtype(dtype).itemsize


@dataclass(frozen=True)
class Operations:
    """Of a whole step on all devices.

    Attributes:
        attention: products with scores, forward and backward, computed again where they are.
        other: all other products, with the forward pass that rematerialisation repeats.
    """

    attention: float
    other: float


def operations(config: TrainConfig, parameters: int, rows: int, steps: int) -> Operations:
    """What is really computed; `agent.throughput.step_flops` is what is counted for utilisation.

    Attention's backward pass computes the scores again: half of them under a causal mask, those
    within trajectories where these are apart, all of them in memory mode plain. Of a block's other
    products, a third of them the feed-forward's second, all but that one are computed again.
    """
    if config.method not in TRANSFORMERS:
        return Operations(0.0, 6.0 * parameters * rows)
    model, length = config.model, steps * config.tokens_per_step
    whole = model.memory == "plain"
    count = 1 if whole else _apart(config, steps)
    attention = count * ring.cost.attention_flops(
        1, length // count, 1, model.width, causal=not whole, backward=True
    )
    forward = ring.cost.sequence_flops(1, model.width, length)
    forward -= ring.cost.attention_flops(1, length, 1, model.width)
    other = (3 + 2 / 3) * forward
    return Operations(rows * model.layers * attention, rows * model.layers * other)


def _apart(config: TrainConfig, steps: int) -> int:
    """Trajectories of a sequence that do not see each other; 1 where they do."""
    if config.method != "at" or config.model.cross_episode:
        return 1
    return max(1, steps // networks.dimensions(config).timesteps)


def _hops(config: TrainConfig, steps: int) -> int:
    """How often keys are sent on: R − 1 times, or as far as a trajectory that is apart reaches."""
    size, count = config.mesh.ring, _apart(config, steps)
    if count == 1:
        return size - 1
    of_device, length = steps // size, networks.dimensions(config).timesteps
    return max(((i + 1) * length - 1) // of_device - i * length // of_device for i in range(count))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, as expected.

    Attributes:
        attention: its products.
        other: all other products.
        transfer: keys, values and gradients around the ring, were nothing computed meanwhile.
        exposed: of these, what no product hides.
        partial: sums of activations over mesh.tensor, hidden by nothing.
        parameters: gathering them twice and summing their gradients once for each part of a batch,
            hidden by nothing.
    """

    attention: float
    other: float
    transfer: float
    exposed: float
    partial: float
    parameters: float

    @property
    def total(self) -> float:
        """All that takes time."""
        return self.attention + self.other + self.exposed + self.partial + self.parameters


def step_time(
    config: TrainConfig,
    work: Operations,
    bytes_: Bytes,
    *,
    rows: int,
    steps: int,
    flops_per_second: float,
    link: Callable[[int], float],
    hidden: bool,
) -> StepTime:
    """Expected seconds of a step.

    Args:
        config: of the run.
        work: of the whole step.
        bytes_: of a device.
        rows: B.
        steps: S.
        flops_per_second: that a device is expected to reach.
        link: bytes a second of the slowest link among so many neighbouring devices; infinity
            where there is none.
        hidden: the ring's messages travel while products run, all but the last of each layer's
            backward pass, which brings gradients home.
    """
    model, mesh = config.model, config.mesh
    size = np.dtype(model.dtype).itemsize
    attention = work.attention / mesh.devices / flops_per_second
    other = work.other / mesh.devices / flops_per_second
    transfer = exposed = partial = 0.0
    if config.method in TRANSFORMERS:
        tokens = rows // (mesh.data * mesh.fsdp) * steps * config.tokens_per_step / mesh.ring
        numbers = model.layers * tokens * model.width  # of activations, of all layers
        hop = numbers / mesh.tensor / link(mesh.ring * mesh.tensor)
        hops = _hops(config, steps)
        home = 8 * hop if hops else 0.0
        transfer = hops * (2 * 2 * size + 8) * hop + home
        exposed = home + max(0.0, transfer - home - attention) if hidden else transfer
        # Of both outputs of a block forward, of attention's again, and of both inputs' gradients.
        partial = 5 * _summed(mesh.tensor) * numbers * size / link(mesh.tensor)
    shards = mesh.fsdp * mesh.ring
    gathered = (shards - 1) * 3 * size / 4 / link(shards * mesh.tensor)
    summed = _summed(mesh.data) * size / 4 / link(mesh.devices)
    parameters = config.optimizer.accumulation * bytes_.parameters * (gathered + summed)
    return StepTime(attention, other, transfer, exposed, partial, parameters)


def _summed(devices: int) -> float:
    """How often a device sends an array that is summed over so many devices, in a ring."""
    return 2 * (devices - 1) / devices
