"""The small DDPG: what it samples, what it aims at, and that it finds a known best action."""

import jax
import jax.numpy as jnp
import numpy as np

from exorl.collect import LearnerConfig, ddpg


def toy_replay(episodes=3, steps=20, observations=2, actions=1, reward=None):
    """Observations that name their episode and row; uniform actions."""
    rng = np.random.default_rng(0)
    observation = np.zeros((episodes, steps + 1, observations), np.float32)
    observation[..., 0] = np.arange(episodes)[:, None]
    observation[..., 1] = np.arange(steps + 1)
    action = rng.uniform(-1, 1, (episodes, steps + 1, actions)).astype(np.float32)
    paid = rng.normal(size=(episodes, steps + 1)) if reward is None else reward(action)
    return ddpg.Replay(observation, action, np.asarray(paid, np.float32))


def test_a_sample_follows_the_rows_of_exorl():
    config, replay = LearnerConfig(batch=200, n_step=3, discount=0.9), toy_replay()
    batches = ddpg.sample(config, replay, 2, 3, np.random.default_rng(0))
    assert batches.reward.shape == (3, 200)
    batch = ddpg.Batch(*(field.reshape(600, *field.shape[2:]) for field in batches))
    episode, time = batch.observation.astype(int).T
    assert set(episode) == {0, 1}  # the third is not looked at
    assert set(time) == set(range(20 - 3 + 1))
    for row in range(600):
        e, t = episode[row], time[row]
        assert (batch.action[row] == replay.action[e, t + 1]).all()
        assert (batch.next_observation[row] == [e, t + 3]).all()
        r = replay.reward[e]
        expected = r[t + 1] + 0.9 * r[t + 2] + 0.81 * r[t + 3]
        np.testing.assert_allclose(batch.reward[row], expected, rtol=1e-5, atol=1e-6)


def test_one_step_is_adam_on_the_n_step_target():
    config = LearnerConfig(
        width=8, batch=16, n_step=2, discount=0.5, learning_rate=1e-2, noise=0.0, target_rate=0.1
    )
    learner = ddpg.init(config, np.random.default_rng(1), 2, 1)
    batches = ddpg.sample(config, toy_replay(), 3, 1, np.random.default_rng(0))
    batch = ddpg.Batch(*(field[0] for field in batches))
    after = jax.jit(ddpg.step, static_argnums=0)(config, learner, batch)

    def value(network, observation, action):
        first, second, last = network
        x = jnp.concatenate([observation, action], axis=1) @ first["weight"] + first["bias"]
        x = jnp.tanh((x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-5))
        x = jnp.maximum(x @ second["weight"] + second["bias"], 0)
        return (x @ last["weight"] + last["bias"])[:, 0]

    next_action = ddpg.policy(learner.actor, batch.next_observation)
    goal = batch.reward + 0.5**2 * value(learner.target, batch.next_observation, next_action)

    def loss(network):
        return jnp.mean((value(network, batch.observation, batch.action) - goal) ** 2)

    def is_adams_first_step(new, old, gradient):  # against each sign, by the learning rate
        clear = np.abs(gradient) > 1e-4
        np.testing.assert_allclose((new - old)[clear], -1e-2 * np.sign(gradient)[clear], rtol=1e-2)
        return clear.any()

    moved = jax.tree.map(
        is_adams_first_step, after.critic, learner.critic, jax.jit(jax.grad(loss))(learner.critic)
    )
    assert all(jax.tree.leaves(moved))
    for new, old, goal in zip(
        *map(jax.tree.leaves, (after.target, learner.target, after.critic)), strict=True
    ):
        np.testing.assert_allclose(new, old + 0.1 * (goal - old), atol=1e-6)


def test_it_finds_the_best_action():
    replay = toy_replay(reward=lambda action: -((action[..., 0] - 0.4) ** 2))
    replay = replay._replace(observation=np.zeros_like(replay.observation))
    config = LearnerConfig(width=32, batch=64, n_step=1, discount=0.0, learning_rate=3e-3)
    learner = ddpg.init(config, np.random.default_rng(1), 2, 1)
    before = ddpg.policy(learner.actor, replay.observation[0, :1])
    batches = ddpg.sample(config, replay, 3, 300, np.random.default_rng(0))
    learner = ddpg.learn(config, learner, batches)
    after = ddpg.policy(learner.actor, replay.observation[0, :1])
    assert np.abs(before).max() < 0.1
    np.testing.assert_allclose(after, 0.4, atol=0.1)
