"""From a config to its network and its batches, for every method."""

import math
from functools import partial

import jax
from flax import nnx
from jax.sharding import Mesh

from agent import sharding
from agent.baselines import BehaviourCloning
from agent.config import TrainConfig
from agent.model import AgenticTransformer, Dimensions
from data.normalize import Normalizer
from data.packing import steps_in
from data.pool import Pool
from data.sampling import ChainSampler, Sampler, WindowSampler, sequences
from exorl import task

Network = AgenticTransformer | BehaviourCloning

CLONED_FRACTION = {"bc": 1.0, "bc10": 0.1}
"""Part of the pool, best first, that behaviour cloning imitates."""


def dimensions(config: TrainConfig) -> Dimensions:
    """Sizes of the network's inputs and outputs.

    Raises:
        ValueError: the tasks do not share one domain.
    """
    tasks = [task(name) for name in config.data.tasks]
    if len({each.domain for each in tasks}) != 1:
        raise ValueError(f"data.tasks={config.data.tasks} must belong to one domain")
    chunk = config.model.chunk
    return Dimensions(
        observation=tasks[0].observation_dim,
        action=chunk * tasks[0].action_dim,
        timesteps=steps_in(tasks[0].episode_length, chunk),
        trajectories=config.data.index_range or config.data.trajectories,
    )


def network(config: TrainConfig, key: jax.Array) -> Network:
    """A network with fresh parameters."""
    kind = BehaviourCloning if config.method in CLONED_FRACTION else AgenticTransformer
    return kind(config.model, dimensions(config), key=key)


def assemble(structure: nnx.GraphDef, parameters: nnx.State) -> Network:
    """The network of stored parameters, those beside the stacked blocks whole on every device.

    The blocks' are gathered layer by layer, see `agent.sharding.gathered`.
    """
    return nnx.merge(structure, sharding.gathered(parameters, but=sharding.STACKED))


def abstract_parameters(config: TrainConfig, mesh: Mesh) -> tuple[nnx.GraphDef, nnx.State]:
    """The network's structure, and its parameters as shapes with shardings."""
    structure, shapes = nnx.split(nnx.eval_shape(lambda: network(config, jax.random.key(0))))
    return structure, sharding.with_shardings(shapes, mesh)


def parameter_count(config: TrainConfig, mesh: Mesh) -> int:
    """Numbers that training learns."""
    _, parameters = abstract_parameters(config, mesh)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameters))


def sampler(
    config: TrainConfig, pool: Pool, normalizer: Normalizer, *, held_out: bool = False
) -> Sampler:
    """What a training step's batch is drawn by.

    Held-out batches, never trained on, have as many trajectories a chain as there are episodes
    for, at most N, so that all are of one shape.
    """
    data, model, multiple = config.data, config.model, config.resolved().data.multiple or 1
    most = min(data.trajectories, len(pool.held_out)) if held_out else data.trajectories
    chains = partial(
        ChainSampler,
        pool=pool,
        normalizer=normalizer,
        packing=model.packing,
        chunk=model.chunk,
        batch_tokens=data.batch_tokens,
        multiple=multiple,
        held_out=held_out,
    )
    if config.method == "dt_long":
        return chains(trajectories=1)
    if config.method == "at":
        return chains(
            trajectories=most,
            fixed=data.fixed or held_out,
            top=data.top,
            relabel=data.relabel,
            context=data.context,
            loss_on=data.loss_on,
            cross_episode=model.cross_episode,
            index_range=data.index_range,
        )
    cloning = config.method in CLONED_FRACTION
    window = 1 if cloning else data.window
    tokens = 1 if cloning else window * config.tokens_per_step
    return WindowSampler(
        pool=pool,
        normalizer=normalizer,
        chunk=model.chunk,
        window=window,
        top=CLONED_FRACTION.get(config.method, 1.0),
        windows=sequences(tokens, data.batch_tokens, multiple),
        held_out=held_out,
    )
