"""Cached rollouts equal the full forward pass at every step, across episodes, shards, prefixes."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from agent import networks
from agent import policy as policies
from agent.cache import row_order
from agent.checkpoint import Agent
from agent.config import MeshConfig, ModelConfig
from agent.sharding import make_mesh
from data.batches import Batch, place, positions
from data.normalize import Normalizer
from ring.layout import inverse

SMALL = {"layers": 2, "width": 16, "heads": 2, "block_size": 8}


def agent_of(config) -> Agent:
    mesh = make_mesh(config.mesh)
    structure, parameters = nnx.split(networks.network(config, jax.random.key(1)))
    normalizer = Normalizer(np.zeros(17, np.float32), np.ones(17, np.float32))
    return Agent(config, structure, parameters, normalizer, {}, mesh, 0)


def random_steps(rows: int, steps: int, length: int, actions: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    normal = lambda n: rng.normal(size=(rows, steps, n)).astype(np.float32)  # noqa: E731
    tile = lambda x: np.tile(np.asarray(x, np.int32), (rows, 1))  # noqa: E731
    action, reward = np.tanh(normal(actions)), normal(1)
    completion = (rng.random((rows, steps, 1)) < 0.3).astype(np.float32)
    shift = lambda x: np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)  # noqa: E731
    return Batch(
        normal(1),
        normal(17),
        action,
        reward,
        completion,
        shift(action),
        shift(reward),
        shift(completion),
        tile(np.arange(steps) % length),
        tile(np.arange(steps) // length),
        tile(np.arange(steps)),
        np.tile(np.arange(rows, dtype=np.int32)[:, None], steps),
        np.zeros((rows, steps), np.float32),
    )


def part(batch: Batch, steps: slice) -> Batch:
    return Batch(*(array[:, steps] for array in batch))


@pytest.mark.parametrize(
    ("mesh", "context", "model"),
    [
        ({}, 0, {"packing": "step", "positions": "learned"}),
        ({}, 10, {"packing": "rsar", "positions": "rotary"}),
        ({"data": 2, "ring": 4}, 10, {"packing": "step", "positions": "learned"}),
        ({"data": 2, "ring": 4}, 0, {"packing": "rsar", "positions": "rotary"}),
        ({"ring": 8}, 10, {"packing": "rsar", "positions": "rotary"}),
        ({"ring": 8}, 0, {"packing": "step", "positions": "global", "completion": True}),
        ({"ring": 4, "tensor": 2}, 10, {"packing": "rsard", "positions": "global"}),
        ({"ring": 4}, 10, {"packing": "rsa", "cross_episode": False}),
        ({}, 10, {"packing": "step", "positions": "timestep", "cross_episode": False}),
    ],
)
def test_cached_rollout_equals_the_full_forward(config, monkeypatch, mesh, context, model):
    """Two episodes of 5 steps, fed one at a time, after a context of none or two others."""
    mesh, cross_episode = MeshConfig(**mesh), model.get("cross_episode", True)
    made = config(model=ModelConfig(chunk=1, **SMALL, **model), mesh=mesh, data={"trajectories": 4})
    dims = dataclasses.replace(networks.dimensions(made), timesteps=5)
    monkeypatch.setattr(networks, "dimensions", lambda config: dims)
    made = agent_of(made)
    whole = random_steps(2, context + 10, 5, 6, seed=0)
    with jax.set_mesh(made.mesh):
        network = nnx.merge(made.structure, made.parameters)
        how = "zigzag" if cross_episode else "contiguous"
        laid_out = jax.jit(lambda batch: network(batch))(place(whole, made.mesh, how))
    back = inverse(positions(context + 10, mesh.ring, how))
    expected = np.asarray(laid_out)[:, back][:, : context + 10]

    prefix = part(whole, slice(0, context)) if context else None
    policy = policies.make(made, batch=2, steps=10, context=prefix)
    for step in range(10):
        now = part(whole, slice(context + step, context + step + 1))
        blind = now._replace(
            action=np.full_like(now.action, np.nan),
            reward=now.reward * np.nan,
            completion=now.completion * np.nan,
        )
        action = policy.act(blind)
        np.testing.assert_allclose(action, expected[:, context + step], atol=2e-6)
        policy.record(now)


def test_decision_transformer_on_whole_episodes_forgets_between_them(config):
    """Each episode's actions are those of the full forward over it alone, at index 0."""
    model = ModelConfig(packing="rsa", positions="learned", chunk=1, **SMALL)
    made = agent_of(config(method="dt_long", model=model, mesh=MeshConfig(ring=2)))
    policy = policies.make(made, batch=2, steps=5)
    for episode in range(2):
        alone = random_steps(2, 5, 5, 6, seed=episode)
        with jax.set_mesh(made.mesh):
            network = nnx.merge(made.structure, made.parameters)
            laid_out = jax.jit(lambda batch, of=network: of(batch))(place(alone, made.mesh))
        expected = np.asarray(laid_out)[:, inverse(positions(5, 2, "zigzag"))]
        for step in range(5):
            now = part(alone, slice(step, step + 1))
            now = now._replace(trajectory=np.full((2, 1), episode, np.int32))
            np.testing.assert_allclose(policy.act(now), expected[:, step], atol=2e-6)
            policy.record(now)


def test_a_full_cache_says_so(config):
    made = agent_of(config(model=ModelConfig(chunk=1, **SMALL)))
    steps = random_steps(2, 1, 5, 6, seed=0)
    policy = policies.make(made, batch=2, steps=1)
    policy.act(steps)
    policy.record(steps)
    with pytest.raises(ValueError, match="room for 1 steps"):
        policy.act(steps)


def test_rollouts_that_do_not_divide_are_refused(config):
    made = agent_of(config(mesh=MeshConfig(data=2)))
    with pytest.raises(ValueError, match=r"3 rollouts do not divide .* use 4"):
        policies.make(made, batch=3, steps=1)


def test_rows_of_the_cache_fill_the_shards_evenly():
    order = row_order(steps=5, tokens_per_step=2, ring_size=2, first_step=10).reshape(2, -1)
    assert order[0].tolist() == [20, 21, 24, 25, 28, 29]  # steps 0, 2, 4 after ten others
    assert order[1].tolist() == [22, 23, 26, 27, 30, 31]  # steps 1, 3 and one never written


def test_the_window_of_a_decision_transformer_is_its_last_steps(config):
    model = ModelConfig(packing="rsa", chunk=1, **{**SMALL, "memory": "plain"})
    made = agent_of(config(method="dt", model=model, data={"window": 4}))
    whole = random_steps(2, 7, 7, 6, seed=0)
    policy = policies.make(made, batch=2, steps=7)
    with jax.set_mesh(made.mesh):
        network = nnx.merge(made.structure, made.parameters)
        for step in range(7):
            policy_action = policy.act(part(whole, slice(step, step + 1)))
            window = part(whole, slice(max(0, step - 3), step + 1))
            expected = network(jax.tree.map(jax.numpy.asarray, window))[:, -1]
            np.testing.assert_allclose(policy_action, expected, atol=2e-6)
            policy.record(part(whole, slice(step, step + 1)))


def test_decoding_uses_at_most_two_collectives_a_layer(config):
    made = agent_of(config(model=ModelConfig(chunk=1, **SMALL), mesh=MeshConfig(ring=8)))
    policy = policies.make(made, batch=2, steps=10)
    with jax.set_mesh(made.mesh):
        compiled = policies._decode.lower(
            made.structure,
            (0,),
            made.parameters,
            policy._cache,
            (),
            random_steps(2, 1, 1, 6, seed=0),
            np.int32(0),
        ).compile()
    text = compiled.as_text()
    collectives = sum(
        text.count(f" {name}(") for name in ("all-reduce", "all-gather", "all-to-all")
    )
    # The scanned block appears once in the program.
    assert 0 < collectives + text.count(" collective-permute(") <= 2
