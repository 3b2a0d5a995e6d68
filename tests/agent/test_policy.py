"""Cached rollouts equal the full forward pass at every step, across episodes, shards, prefixes."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from agent import cache as caches
from agent import networks
from agent import policy as policies
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
        pytest.param({}, 0, {"packing": "step", "positions": "learned"}, marks=pytest.mark.slow),
        ({}, 10, {"packing": "rsar", "positions": "rotary"}),
        ({"data": 2, "ring": 4}, 10, {"packing": "step", "positions": "learned"}),
        pytest.param({"data": 2, "ring": 4}, 0, {"packing": "rsar"}, marks=pytest.mark.slow),
        pytest.param({"ring": 8}, 10, {"packing": "rsar"}, marks=pytest.mark.slow),
        ({"ring": 8}, 0, {"packing": "step", "positions": "global", "completion": True}),
        pytest.param({"ring": 2}, 10, {"packing": "rsa"}, marks=pytest.mark.slow),
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
    policy = policies.ChainPolicy(made, batch=2, steps=10)
    policy.remember(prefix)
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


@pytest.mark.slow
def test_a_bfloat16_cache_is_half_as_large_and_nearly_as_exact(config):
    made = agent_of(config(model=ModelConfig(packing="rsar", chunk=1, **SMALL)))
    whole = random_steps(2, 15, 5, 6, seed=0)
    found, held = {}, {}
    for dtype in ("float32", "bfloat16"):
        policy = policies.ChainPolicy(made, batch=2, steps=5, dtype=dtype)
        policy.remember(part(whole, slice(0, 10)))
        for step in range(10, 15):
            now = part(whole, slice(step, step + 1))
            found[dtype] = policy.act(now)
            policy.record(now)
        both = (*policy._prefix, policy._cache)
        held[dtype] = sum(x.nbytes for each in both for x in (*each.key, *each.value))
    assert held["bfloat16"] * 2 == held["float32"]
    difference = np.abs(found["bfloat16"] - found["float32"]).max()
    assert 0 < difference < 0.02


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


def test_rows_fill_the_shards_evenly_and_a_full_cache_begins_again():
    """Two slots a step on a ring of 2, room for 4 steps, 6 written after ten others."""
    mesh = make_mesh(MeshConfig(ring=2))
    sizes = {"layers": 1, "batch": 1, "heads": 1, "head_dim": 4, "dtype": "float32"}
    with jax.set_mesh(mesh):
        cache = caches.empty(mesh, rows=caches.capacity(3, 2, 2), segmented=False, **sizes)
        for step in range(6):
            order = np.arange(2, dtype=np.int32) + 2 * (10 + step)
            keys = np.broadcast_to(order, (1, 1, 4, 2)).astype(np.float32)
            new = caches.Cache((keys,), (-keys.swapaxes(2, 3),), order, None)
            cache = caches.append(cache, new, 0, 2, np.int32(step))
        found = np.asarray(cache.order).reshape(2, -1)
        assert found[0].tolist() == [28, 29, 24, 25]  # steps 4 (over 0) and 2
        assert found[1].tolist() == [30, 31, 26, 27]
        np.testing.assert_array_equal(np.asarray(cache.key[0])[0, 0, 0], found.ravel())
        np.testing.assert_array_equal(np.asarray(cache.value[0])[0, 0, :, 3], -found.ravel())
        kept = np.asarray(caches.forget(cache.order, np.int32(28)))
    assert sorted(kept.tolist()) == [-1, -1, -1, -1, 28, 29, 30, 31]


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


def programs(made: Agent, *, steps: int, context: int = 0):
    """The two programs of one step compiled, and the bytes of the own cache on a device."""
    policy = policies.ChainPolicy(made, batch=2, steps=steps)
    if context:
        policy.remember(random_steps(1, context, 5, 6, seed=0))
    step = random_steps(2, 1, 1, 6, seed=0)
    operands = (made.structure, (0,), policy._weights, policy._cache, policy._prefix, step)
    with jax.set_mesh(made.mesh):
        decode = policies._decoder(made.mesh).lower(*operands)
        _, new = decode.out_info[1], decode.out_info[0]
        append = caches.append.lower(policy._cache, new, 0, policy._slots, np.int32(0))
    held = sum(array.nbytes for array in jax.tree.leaves(policy._cache)) // made.mesh.size
    return decode.compile(), append.compile(), held


@pytest.mark.slow
def test_prefilling_holds_no_second_copy_of_all_layers(config):
    """Temporary bytes grow with depth by less than half of what the prefix grows by."""
    found = []
    for layers in (4, 8):
        model = ModelConfig(chunk=1, **{**SMALL, "layers": layers, "width": 64, "block_size": 256})
        made = agent_of(config(model=model, mesh=MeshConfig(ring=2), data={"trajectories": 800}))
        policy = policies.ChainPolicy(made, batch=1, steps=2)
        context = place(random_steps(1, 4_000, 5, 6, seed=0), made.mesh)
        with jax.set_mesh(made.mesh):
            operands = (made.structure, "float32", False, policy._weights, context)
            lowered = policies._prefiller(made.mesh).lower(*operands)
            found.append(lowered.compile().memory_analysis())
    prefix = found[1].output_size_in_bytes - found[0].output_size_in_bytes
    assert prefix >= 4 * 2 * 4_000 * 64 * 4 // 2  # of a device
    assert found[1].temp_size_in_bytes - found[0].temp_size_in_bytes < prefix / 2


def test_decoding_uses_at_most_two_collectives_a_layer(config):
    made = agent_of(config(model=ModelConfig(chunk=1, **SMALL), mesh=MeshConfig(ring=8)))
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    decode, append, _ = programs(made, steps=10)
    counts = [sum(each.as_text().count(f" {name}(") for name in names) for each in (decode, append)]
    assert 0 < counts[0] <= 2 * SMALL["layers"] and counts[1] == 0


@pytest.mark.parametrize(
    ("packing", "ring"),
    [
        ("step", 2),
        pytest.param("step", 1, marks=pytest.mark.slow),
        pytest.param("rsar", 1, marks=pytest.mark.slow),
        pytest.param("rsar", 2, marks=pytest.mark.slow),
    ],
)
def test_decoding_copies_no_cache_and_writes_it_in_place(config, packing, ring):
    """Neither program has temporaries of the size of a single layer's keys."""
    model = ModelConfig(chunk=1, packing=packing, **{**SMALL, "width": 64})
    made = agent_of(config(model=model, mesh=MeshConfig(ring=ring), data={"trajectories": 800}))
    decode, append, held = programs(made, steps=2_000, context=2_000)
    keys = held / SMALL["layers"] / 2
    assert decode.memory_analysis().temp_size_in_bytes < keys / 4
    assert append.memory_analysis().temp_size_in_bytes < keys / 100
    assert append.memory_analysis().alias_size_in_bytes >= held
