"""From a config to its network and its batches, for every method."""

import jax
from flax import nnx
from jax.sharding import Mesh

from agent.baselines import BehaviourCloning
from agent.config import TrainConfig
from agent.model import AgenticTransformer, Dimensions
from agent.sharding import state_sharding
from data.normalize import Normalizer
from data.packing import steps_in
from data.pool import Pool
from data.sampling import ChainSampler, WindowSampler
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
        trajectories=config.data.trajectories,
    )


def network(config: TrainConfig, key: jax.Array) -> Network:
    """A network with fresh parameters."""
    kind = BehaviourCloning if config.method in CLONED_FRACTION else AgenticTransformer
    return kind(config.model, dimensions(config), rngs=nnx.Rngs(params=key))


def abstract_parameters(config: TrainConfig, mesh: Mesh) -> tuple[nnx.GraphDef, nnx.State]:
    """The network's structure, and its parameters as shapes with shardings."""
    structure, shapes = nnx.split(nnx.eval_shape(lambda: network(config, jax.random.key(0))))
    place = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_sharding(shapes, mesh),
    )
    return structure, place


def sampler(
    config: TrainConfig, pool: Pool, normalizer: Normalizer
) -> ChainSampler | WindowSampler:
    """What a training step's batch is drawn by."""
    shards = config.mesh.data * config.mesh.fsdp
    if config.method == "at":
        return ChainSampler(
            pool=pool,
            normalizer=normalizer,
            packing=config.model.packing,
            chunk=config.model.chunk,
            trajectories=config.data.trajectories,
            fixed=config.data.fixed,
            top=config.data.top,
            batch_tokens=config.data.batch_tokens,
            shards=shards,
        )
    cloning = config.method in CLONED_FRACTION
    window = 1 if cloning else config.data.window
    tokens = 1 if cloning else window * config.tokens_per_step
    return WindowSampler(
        pool=pool,
        normalizer=normalizer,
        chunk=config.model.chunk,
        window=window,
        top=CLONED_FRACTION.get(config.method, 1.0),
        windows=shards * max(1, config.data.batch_tokens // (tokens * shards)),
    )
