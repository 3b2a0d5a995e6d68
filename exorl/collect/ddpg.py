"""DDPG with n-step returns, as one compiled function from a replay to a better learner.

Actor, critic and update follow URLB's DDPG (Laskin et al., 2021; url_benchmark), whose first
layer is normalised and squashed: with plain ReLU layers the policy saturates at ±1 and the robot
lies still. The learner lives in a dictionary of arrays; nothing is kept elsewhere.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from exorl.collect.config import LearnerConfig

Network = list[dict[str, Any]]
"""Three layers, each a `weight [I, J]` and a `bias [J]`, float32."""


class Learner(NamedTuple):
    """Everything that learning changes."""

    actor: Network
    critic: Network
    target: Network  # follows the critic slowly
    actor_moments: optax.OptState
    critic_moments: optax.OptState


class Replay(NamedTuple):
    """Episodes in ExoRL's rows, possibly with room for more."""

    observation: np.ndarray  # [N, T+1, O] float32
    action: np.ndarray  # [N, T+1, A] float32
    reward: np.ndarray  # [N, T+1] float32


class Batch(NamedTuple):
    """Transitions over n steps; arrays of NumPy, or of JAX inside an update."""

    observation: Any  # [B, O]
    action: Any  # [B, A], the first of the n
    reward: Any  # [B], the discounted sum of n
    next_observation: Any  # [B, O], after n steps
    noise: Any  # [B, A], on the actions that the actor is improved by
    next_noise: Any  # [B, A], on the actions that the target is computed from


def init(
    config: LearnerConfig, rng: np.random.Generator, observation_dim: int, action_dim: int
) -> Learner:
    """A learner that has seen nothing and hardly moves."""
    actor = _init_network(rng, observation_dim, config.width, action_dim, scale=0.01)
    critic = _init_network(rng, observation_dim + action_dim, config.width, 1, scale=1.0)
    adam = optax.adam(config.learning_rate)
    return Learner(actor, critic, critic, adam.init(actor), adam.init(critic))


@jax.jit
def policy(actor: Network, observation: jax.Array) -> jax.Array:
    """Actions `[B, A]` in (-1, 1), without noise."""
    return jnp.tanh(_network(actor, observation))


def step(config: LearnerConfig, learner: Learner, batch: Batch) -> Learner:
    """One update of critic, actor and target critic."""
    next_action = policy(learner.actor, batch.next_observation) + batch.next_noise
    next_value = _value(learner.target, batch.next_observation, next_action)
    goal = batch.reward + config.discount**config.n_step * next_value

    def critic_loss(critic: Network) -> jax.Array:
        return jnp.mean((_value(critic, batch.observation, batch.action) - goal) ** 2)

    critic, critic_moments = _descend(config, critic_loss, learner.critic, learner.critic_moments)

    def actor_loss(actor: Network) -> jax.Array:
        action = policy(actor, batch.observation) + batch.noise
        return -jnp.mean(_value(critic, batch.observation, action))

    actor, actor_moments = _descend(config, actor_loss, learner.actor, learner.actor_moments)

    rate = config.target_rate
    target = jax.tree.map(lambda old, new: old + rate * (new - old), learner.target, critic)
    return Learner(actor, critic, target, actor_moments, critic_moments)


def sample(
    config: LearnerConfig, replay: Replay, episodes: int, updates: int, rng: np.random.Generator
) -> Batch:
    """Batches `[updates, B, …]`, uniform over all n-step transitions of the first `episodes`."""
    length = replay.reward.shape[1] - 1
    episode = rng.integers(episodes, size=(updates, config.batch))
    time = rng.integers(length - config.n_step + 1, size=(updates, config.batch))
    # Row t + 1 holds the action taken in row t's state, and its reward.
    reward = np.zeros(episode.shape, np.float32)
    for i in range(config.n_step):
        reward += config.discount**i * replay.reward[episode, time + 1 + i]
    shape = (*episode.shape, replay.action.shape[-1])
    noise, next_noise = (
        np.clip(config.noise * rng.standard_normal(shape, np.float32), -0.3, 0.3) for _ in range(2)
    )
    return Batch(
        observation=replay.observation[episode, time],
        action=replay.action[episode, time + 1],
        reward=reward,
        next_observation=replay.observation[episode, time + config.n_step],
        noise=noise,
        next_noise=next_noise,
    )


@functools.partial(jax.jit, static_argnums=0)
def learn(config: LearnerConfig, learner: Learner, batches: Batch) -> Learner:
    """The learner after one update on each of the batches `[updates, B, …]` of `sample`.

    One call for many updates, because starting a computation costs as much as an update.
    """

    def update(learner: Learner, batch: Batch) -> tuple[Learner, None]:
        return step(config, learner, batch), None

    return jax.lax.scan(update, learner, batches)[0]


def _descend(
    config: LearnerConfig,
    loss: Callable[[Network], jax.Array],
    network: Network,
    moments: optax.OptState,
) -> tuple[Network, optax.OptState]:
    gradient = jax.grad(loss)(network)
    change, moments = optax.adam(config.learning_rate).update(gradient, moments)
    return jax.tree.map(jnp.add, network, change), moments


def _value(critic: Network, observation: jax.Array, action: jax.Array) -> jax.Array:
    action = jnp.clip(action, -1, 1)
    return _network(critic, jnp.concatenate([observation, action], axis=-1))[:, 0]


def _network(layers: Network, x: jax.Array) -> jax.Array:
    first, second, last = layers
    x = jnp.tanh(jax.nn.standardize(x @ first["weight"] + first["bias"], epsilon=1e-5))
    x = jax.nn.relu(x @ second["weight"] + second["bias"])
    return x @ last["weight"] + last["bias"]


def _init_network(
    rng: np.random.Generator, inputs: int, width: int, outputs: int, scale: float
) -> Network:
    sizes = ((inputs, width, 1.0), (width, width, 1.0), (width, outputs, scale))
    return [
        {"weight": _orthogonal(rng, i, o, gain), "bias": np.zeros(o, np.float32)}
        for i, o, gain in sizes
    ]


def _orthogonal(rng: np.random.Generator, rows: int, columns: int, gain: float) -> np.ndarray:
    """Orthonormal rows or columns, whichever are fewer (Saxe et al., 2014), times a gain."""
    basis, _ = np.linalg.qr(rng.normal(size=(max(rows, columns), min(rows, columns))))
    return (gain * (basis if rows >= columns else basis.T)).astype(np.float32)
