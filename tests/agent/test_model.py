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
from agent.model import AgenticTransformer, Dimensions, Tokens, keep_mask, rotate
from agent.objective import POSITIONS, action_errors, edges
from agent.sharding import named_leaves
from data.batches import Batch, place, positions, take
from data.packing import SLOTS
from ring.layout import inverse

DIMS = Dimensions(observation=5, action=4, timesteps=10, trajectories=3)
PACKINGS = ("step", "rsar", "rsard", "rsa")
EDGES = edges(DIMS.timesteps, 1)


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
        completion=(rng.random((rows, steps, 1)) < 0.2).astype(np.float32),
        previous_action=shift(action),
        previous_reward=shift(reward),
        previous_completion=(rng.random((rows, steps, 1)) < 0.2).astype(np.float32),
        timestep=tile(np.arange(steps) % length),
        trajectory=tile(np.arange(steps) // length),
        order=tile(np.arange(steps)),
        chain=np.tile(np.arange(rows, dtype=np.int32)[:, None], steps),
        loss_mask=tile(np.arange(steps) >= steps - length).astype(np.float32),
    )


def network(packing: str = "step", **changes) -> AgenticTransformer:
    config = ModelConfig(packing=packing, layers=2, width=16, heads=2, block_size=8)
    config = dataclasses.replace(config, **{"memory": "plain", **changes})
    return AgenticTransformer(config, DIMS, key=jax.random.key(0))


def predictor(model: AgenticTransformer, **mesh: int) -> Callable[[Batch], np.ndarray]:
    """The compiled network on a mesh, from host batch to host actions."""
    devices = ring.make_mesh(**mesh)
    structure, parameters = nnx.split(model)
    call = jax.jit(lambda parameters, batch: nnx.merge(structure, parameters)(batch))

    def predict(batch: Batch) -> np.ndarray:
        steps = batch.order.shape[1]
        with jax.set_mesh(devices):
            laid_out = np.asarray(call(parameters, place(batch, devices)))
        return laid_out[:, inverse(positions(steps, devices.shape["ring"], "zigzag"))][:, :steps]

    return predict


@pytest.mark.parametrize(
    ("packing", "slots"),
    [
        ("step", [("return_to_go", "observation", "previous_reward")]),
        ("rsar", ["return_to_go", "observation", "action", "reward"]),
        ("rsard", ["return_to_go", "observation", "action", "reward", "completion"]),
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
        for name in (*SLOTS["rsard"], "previous_action", "previous_reward", "previous_completion"):
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
        loss = lambda p, b: action_errors(nnx.merge(structure, p)(b), b, EDGES).mean  # noqa: E731
        devices = ring.make_mesh(**mesh)
        with jax.set_mesh(devices):
            return jax.jit(jax.value_and_grad(loss))(parameters, place(batch, devices))

    expected = loss_and_gradient(network(packing), {})
    found = loss_and_gradient(network(packing, memory=memory), mesh)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, jax.device_get(found), jax.device_get(expected))


def test_padding_changes_nothing():
    model, batch = network("rsar"), random_batch()
    padded = take(batch, np.arange(2), np.arange(14))
    poisoned = padded._replace(
        observation=np.where(padded.order[..., None] < 0, 1e6, padded.observation)
    )
    np.testing.assert_allclose(
        predictor(model)(poisoned)[:, :12], predictor(model)(batch), atol=1e-6
    )
    loss = action_errors(jnp.zeros((2, 14, 4)), padded, EDGES).mean
    np.testing.assert_allclose(loss, np.square(batch.action[:, 8:]).mean(), rtol=1e-6)


def test_an_empty_mask_is_no_loss_not_nan():
    batch = random_batch()._replace(loss_mask=np.zeros((2, 12), np.float32))
    assert action_errors(jnp.ones((2, 12, 4)), batch, EDGES).mean == 0


def test_errors_are_told_apart_by_their_place_in_the_episode():
    timestep = np.tile(np.arange(100), (2, 1))
    zeros = random_batch(trajectories=1, length=100)._replace(
        timestep=timestep, action=np.zeros((2, 100, 4), np.float32), loss_mask=np.ones((2, 100))
    )
    found = action_errors(np.sqrt(timestep)[..., None] * np.ones(4), zeros, edges(100, 1))
    assert found.count.tolist() == [40, 10, 50, 50, 50]
    means = dict(zip(POSITIONS, found.total / found.count, strict=True))
    assert means == {
        "first_20": pytest.approx(9.5),
        "quarter_1": pytest.approx(22),
        "quarter_2": pytest.approx(37),
        "quarter_3": pytest.approx(62),
        "quarter_4": pytest.approx(87),
    }
    assert edges(125, 8).tolist() == [3, 32, 63, 94]


@pytest.mark.parametrize(
    ("change", "may_differ"),
    [
        ({"reward_token": False}, {"inputs/reward"}),
        ({"completion": True}, {"inputs/completion"}),
        ({"previous_action": True}, {"inputs/action"}),
        ({"positions": "learned"}, {"trajectories"}),
        ({"positions": "timestep"}, set()),
        ({"positions": "global"}, set()),
        ({"cross_episode": False}, set()),
        ({"dtype": "bfloat16"}, set()),
        ({"dropout": 0.1}, set()),
    ],
)
def test_a_switch_leaves_all_other_parameters_and_changes_predictions(change, may_differ):
    before, after = network(), network(**change)
    ours, theirs = (dict(named_leaves(nnx.state(each))) for each in (before, after))
    for name in {**ours, **theirs}:
        if not name.startswith(tuple(may_differ)):
            np.testing.assert_array_equal(ours[name][...], theirs[name][...], err_msg=name)
    assert {name.rpartition("/")[0] for name in ours.keys() ^ theirs.keys()} == may_differ
    batch = random_batch()
    same = np.array_equal(predictor(before)(batch), predictor(after)(batch))
    assert same == ("dropout" in change)  # which acts only where there is a key


def test_without_cross_episode_attention_trajectories_are_alone():
    model, batch = network("rsar", cross_episode=False), random_batch()
    predict = predictor(model)
    apart = []
    for begin in (0, 4, 8):
        alone = take(batch, np.arange(2), np.arange(begin, begin + 4))
        apart.append(predict(alone._replace(order=batch.order[:, :4])))
    np.testing.assert_allclose(predict(batch), np.concatenate(apart, axis=1), atol=2e-6)


def test_bfloat16_blocks_are_close_and_their_inputs_exact():
    """A return-to-go that bfloat16 cannot tell from another is told apart by its embedding."""
    exact, rough = network("rsar"), network("rsar", dtype="bfloat16")
    batch = random_batch()
    difference = np.abs(predictor(exact)(batch) - predictor(rough)(batch))
    assert 0 < difference.max() < 0.05
    assert predictor(rough)(batch).dtype == np.float32
    near = batch._replace(return_to_go=batch.return_to_go * (1 + 2**-10))
    seen = [np.asarray(rough.inputs["return_to_go"](b.return_to_go)) for b in (batch, near)]
    assert np.all(np.abs(seen[0] - seen[1]).max(axis=-1) > 0)


def test_dropout_depends_on_key_chain_and_order_alone():
    key, order = jax.random.key(0), jnp.stack([jnp.arange(200), jnp.arange(200)])
    chain = jnp.array([[0], [1]]) * jnp.ones_like(order)
    keep = keep_mask(key, chain, order, 32, 0.25)
    np.testing.assert_allclose(keep.mean(), 0.75, atol=0.01)  # of 12,800: 2.6 standard errors
    np.testing.assert_array_equal(keep_mask(key, chain, order[:, ::-1], 32, 0.25), keep[:, ::-1])
    np.testing.assert_array_equal(keep_mask(key, chain[1:], order[1:], 32, 0.25), keep[1:])
    for other in (keep[::-1], keep_mask(jax.random.key(1), chain, order, 32, 0.25)):
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
    tokens = Tokens(ones, order, order, jnp.arange(4)[:, None] * jnp.ones_like(order))
    dropped = block._drop(ones, tokens, jax.random.key(0), branch=0)
    assert set(np.unique(dropped)) == {0.0, 2.0}
    np.testing.assert_allclose(dropped.mean(), 1, atol=0.02)


def test_rotation_keeps_lengths_and_sees_only_differences_of_index():
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)

    def score(i, j):
        at = lambda n: jnp.full((1, 1), n, jnp.int32)  # noqa: E731
        return float((rotate(query, at(i), 1e3) * rotate(key, at(j), 1e3)).sum())

    assert score(0, 3) == pytest.approx(score(5, 8), rel=1e-5)
    assert score(0, 3) != pytest.approx(score(0, 4), rel=1e-3)
    rotated = rotate(query, jnp.full((1, 1), 77, jnp.int32), 1e3)
    assert float(jnp.linalg.norm(rotated)) == pytest.approx(np.linalg.norm(query), rel=1e-5)
    np.testing.assert_array_equal(rotated[..., 8:], query[..., 8:])
