"""The network: token order, strict causality, equal numbers under every memory mode and mesh."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ring
from agent.config import ModelConfig
from agent.model import AgenticTransformer, Dimensions, keep_mask, rotate
from agent.objective import action_error
from data.batches import Batch, pad_steps, place

DIMS = Dimensions(observation=5, action=4, timesteps=10, trajectories=3)
PACKINGS = ("step", "rsar", "rsa")


def random_batch(rows: int = 2, trajectories: int = 3, length: int = 4, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    steps = trajectories * length

    def normal(width):
        return rng.normal(size=(rows, steps, width)).astype(np.float32)

    action, reward = np.tanh(normal(4)), normal(1)
    shift = lambda x: np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)  # noqa: E731
    tile = lambda x: np.tile(np.asarray(x, np.int32), (rows, 1))  # noqa: E731
    return Batch(
        return_to_go=normal(1),
        observation=normal(5),
        action=action,
        reward=reward,
        previous_action=shift(action),
        previous_reward=shift(reward),
        timestep=tile(np.arange(steps) % length),
        trajectory=tile(np.arange(steps) // length),
        order=tile(np.arange(steps)),
        loss_mask=tile(np.arange(steps) >= steps - length).astype(np.float32),
    )


def network(packing: str = "step", **changes) -> AgenticTransformer:
    config = ModelConfig(packing=packing, layers=2, width=16, heads=2, block_size=8)
    config = dataclasses.replace(config, **{"memory": "plain", **changes})
    return AgenticTransformer(config, DIMS, rngs=nnx.Rngs(params=0))


def predictor(model: AgenticTransformer, **mesh: int) -> Callable[[Batch], np.ndarray]:
    """The compiled network on a mesh, from host batch to host actions."""
    devices = ring.make_mesh(**mesh)
    structure, parameters = nnx.split(model)
    call = jax.jit(lambda parameters, batch: nnx.merge(structure, parameters)(batch))

    def predict(batch: Batch) -> np.ndarray:
        with jax.set_mesh(devices):
            return np.asarray(call(parameters, place(batch, devices)))[:, : batch.order.shape[1]]

    return predict


@pytest.mark.parametrize(
    ("packing", "slots"),
    [
        ("step", [("return_to_go", "observation", "previous_reward")]),
        ("rsar", ["return_to_go", "observation", "action", "reward"]),
        ("rsa", ["return_to_go", "observation", "action"]),
    ],
)
def test_golden_token_order(packing, slots):
    """Each token depends on its own inputs of its own step, and nothing else."""
    model, batch = network(packing), random_batch()
    tokens = model.embed(batch, range(len(slots)))
    count = len(slots)
    assert tokens.order[0].tolist() == list(range(12 * count))
    assert tokens.trajectory[0].tolist() == np.repeat(batch.trajectory[0], count).tolist()
    for slot, names in enumerate(slots):
        for name in ("return_to_go", "observation", "action", "reward", "previous_reward"):
            value = getattr(batch, name).copy()
            value[:, 5] += 1
            changed = model.embed(batch._replace(**{name: value}), range(count)).values
            different = np.flatnonzero(np.any(changed[0] != tokens.values[0], axis=-1))
            own = 5 * count + slot
            assert (own in different) == (name in names), (packing, slot, name)
            assert set(different) <= set(range(5 * count, 6 * count))


@pytest.mark.parametrize(
    ("packing", "memory"), [("step", "ring"), ("rsar", "ring"), ("rsar", "plain"), ("rsa", "plain")]
)
def test_strict_causality(packing, memory):
    """Changing a_t and r_t leaves predictions up to t bit-identical, and changes later ones."""
    model, batch = network(packing, memory=memory), random_batch()
    predict = predictor(model, ring=4 if memory == "ring" else 1)
    before = predict(batch)
    for t in (0, 3, 4, 10):
        changes = {}
        for name in ("action", "reward"):
            value = getattr(batch, name).copy()
            value[:, t] += 1
            changes[name] = value
            later = getattr(batch, f"previous_{name}").copy()
            later[:, t + 1] += 1
            changes[f"previous_{name}"] = later
        after = predict(batch._replace(**changes))
        np.testing.assert_array_equal(after[:, : t + 1], before[:, : t + 1])
        assert np.all(np.any(after[:, t + 1 :] != before[:, t + 1 :], axis=-1))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("changed", ["observation", "return_to_go"])
def test_later_steps_never_reach_back(packing, changed):
    model, batch = network(packing), random_batch()
    predict = predictor(model)
    value = getattr(batch, changed).copy()
    value[:, 6:] += 1
    after = predict(batch._replace(**{changed: value}))
    np.testing.assert_array_equal(after[:, :6], predict(batch)[:, :6])


@pytest.mark.parametrize(
    ("packing", "memory", "mesh"),
    [
        ("step", "memory_efficient", {"data": 2}),
        ("rsar", "bpt", {}),
        ("rsar", "ring", {"ring": 8}),
        ("step", "ring", {"data": 2, "ring": 4}),
        ("rsar", "ring", {"ring": 2, "tensor": 2, "fsdp": 2}),
    ],
)
def test_memory_modes_compute_the_same(packing, memory, mesh):
    """Loss and gradients of every mode and mesh equal plain attention's."""
    batch = random_batch()

    def loss_and_gradient(model, mesh):
        structure, parameters = nnx.split(model)
        loss = lambda p, b: action_error(nnx.merge(structure, p)(b), b)  # noqa: E731
        devices = ring.make_mesh(**mesh)
        with jax.set_mesh(devices):
            return jax.jit(jax.value_and_grad(loss))(parameters, place(batch, devices))

    expected = loss_and_gradient(network(packing), {})
    found = loss_and_gradient(network(packing, memory=memory), mesh)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, jax.device_get(found), jax.device_get(expected))


def test_padding_changes_nothing():
    model, batch = network("rsar"), random_batch()
    padded = pad_steps(batch, 7)
    poisoned = padded._replace(
        observation=np.where(padded.order[..., None] < 0, 1e6, padded.observation)
    )
    np.testing.assert_allclose(
        predictor(model)(poisoned)[:, :12], predictor(model)(batch), atol=1e-6
    )
    loss = action_error(jnp.zeros((2, 14, 4)), padded)
    np.testing.assert_allclose(loss, np.square(batch.action[:, 8:]).mean(), rtol=1e-6)


def test_an_empty_mask_is_no_loss_not_nan():
    batch = random_batch()._replace(loss_mask=np.zeros((2, 12), np.float32))
    assert action_error(jnp.ones((2, 12, 4)), batch) == 0


def test_dropout_depends_on_key_chain_and_order_alone():
    key, order = jax.random.key(0), jnp.stack([jnp.arange(200), jnp.arange(200)])
    keep = keep_mask(key, order, 32, 0.25)
    np.testing.assert_allclose(keep.mean(), 0.75, atol=0.01)  # of 12,800: 2.6 standard errors
    np.testing.assert_array_equal(keep_mask(key, order[:, ::-1], 32, 0.25), keep[:, ::-1])
    for other in (keep[::-1], keep_mask(jax.random.key(1), order, 32, 0.25)):
        np.testing.assert_allclose((keep == other).mean(), 0.75**2 + 0.25**2, atol=0.02)


def test_dropout_keeps_the_mean_and_only_acts_with_a_key():
    model, batch = network(dropout=0.5), random_batch()
    mesh = ring.make_mesh()
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(model(batch), model(batch))
        first, second = (model(batch, jax.random.key(seed)) for seed in (0, 1))
        assert float(jnp.abs(first - second).mean()) > 0.01
        assert float(jnp.abs(first - model(batch)).mean()) > 0.01
    block = jax.tree.map(lambda leaf: leaf[0], model.blocks)
    ones, order = jnp.ones((4, 500, 16)), jnp.tile(jnp.arange(500), (4, 1))
    dropped = block._drop(ones, order, jax.random.key(0), branch=0)
    assert set(np.unique(dropped)) == {0.0, 2.0}
    np.testing.assert_allclose(dropped.mean(), 1, atol=0.02)


def test_rotation_keeps_lengths_and_sees_only_differences_of_index():
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    def score(i, j):
        at = lambda n: jnp.full((1, 1), n, jnp.int32)  # noqa: E731
        return float((rotate(query, at(i)) * rotate(key, at(j))).sum())

    assert score(0, 3) == pytest.approx(score(5, 8), rel=1e-5)
    assert score(0, 3) != pytest.approx(score(0, 4), rel=1e-3)
    rotated = rotate(query, jnp.full((1, 1), 77, jnp.int32))
    assert float(jnp.linalg.norm(rotated)) == pytest.approx(np.linalg.norm(query), rel=1e-5)
    np.testing.assert_array_equal(rotated[..., 8:], query[..., 8:])
