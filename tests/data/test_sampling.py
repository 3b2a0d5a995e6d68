import dataclasses

import jax
import numpy as np
import pytest

import ring
from data.batches import Batch, place, positions
from data.normalize import Normalizer
from data.packing import steps_in
from data.pool import Pool, spread
from data.sampling import ChainSampler, WindowSampler, placed, trajectory_counts, whole
from exorl import relabel

RUN, BACK = "cheetah_run", "cheetah_run_backward"


@pytest.fixture(scope="module")
def single(cheetah_store) -> Pool:
    return Pool.load(cheetah_store, (RUN,))


@pytest.fixture(scope="module")
def hidden(cheetah_store) -> Pool:
    return Pool.load(cheetah_store, (RUN, BACK))


def sampler(pool: Pool, **changes) -> ChainSampler:
    base = ChainSampler(
        pool=pool,
        normalizer=pool.normalizer(),
        packing="step",
        chunk=8,
        trajectories=4,
        fixed=False,
        top=0.2,
        batch_tokens=200,
        multiple=2,
    )
    return dataclasses.replace(base, **changes)


def assert_equal(a: Batch, b: Batch) -> None:
    for name, left, right in zip(Batch._fields, a, b, strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name)


def test_a_batch_is_a_function_of_seed_and_step(hidden):
    first, again = sampler(hidden), sampler(hidden)
    whole(first, 0, 1)  # whatever was drawn before must not matter
    assert_equal(whole(first, 3, 7), whole(again, 3, 7))
    changed = [whole(first, 3, 8), whole(first, 4, 7)]
    assert all(
        batch.order.shape != whole(again, 3, 7).order.shape
        or not np.array_equal(batch.observation, whole(again, 3, 7).observation)
        for batch in changed
    )


def test_every_n_is_drawn_and_tokens_stay_about_constant(single):
    made = sampler(single, batch_tokens=300)
    counts = [made.trajectories_at(0, step) for step in range(200)]
    assert set(counts) == {1, 2, 3, 4}
    for count in set(counts):
        tokens = made.chains(count) * count * steps_in(83, 8)
        assert made.chains(count) % 2 == 0
        assert 100 < tokens <= 300


def test_counts_above_eight_are_powers_of_two():
    assert trajectory_counts(4) == [1, 2, 3, 4]
    assert trajectory_counts(128) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128]
    assert trajectory_counts(40) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 40]


def test_the_last_trajectory_is_among_the_best(single):
    made = sampler(single, top=0.1)
    threshold = single.returns[RUN][single.best(RUN, 0.1)].min()
    for row in range(50):
        assert made.chain(0, 0, row, 3).trajectories[-1].episode_return >= threshold - 1e-3


def test_training_never_sees_held_out_episodes(single):
    def starts(episodes):
        return {single.trajectory(episode, RUN).observation[0].tobytes() for episode in episodes}

    made = sampler(single, top=1.0)
    chains = [made.chain(0, 0, row, 4) for row in range(100)]
    seen = {each.observation[0].tobytes() for made in chains for each in made.trajectories}
    assert seen == starts(single.training)
    assert not seen & starts(single.held_out)


def test_hidden_chains_are_of_every_task_on_one_scale(hidden):
    made = sampler(hidden)
    chains = [made.chain(0, 0, row, 2) for row in range(40)]
    scales = {hidden.best_return(task): task for task in (RUN, BACK)}
    assert {each.scale for each in chains} == set(scales)
    for each in chains:
        returns = hidden.returns[scales[each.scale]]
        assert np.abs(returns - each.targets[-1]).min() < 1e-3
        assert each.targets[-1] <= 1.3 * each.scale  # about 1 at most, whichever the task


def test_a_single_task_has_one_scale(single):
    made = sampler(single)
    chains = [made.chain(0, 0, row, 2) for row in range(20)]
    assert {each.scale for each in chains} == {single.best_return(RUN)}
    assert len({each.targets for each in chains}) > 1


def test_trajectories_follow_exorls_off_by_one(single):
    trajectory, stored = single.trajectory(3, RUN), single.store[3]
    assert len(trajectory) == len(stored.observation) - 1
    np.testing.assert_array_equal(trajectory.observation[0], stored.observation[0])
    np.testing.assert_array_equal(trajectory.action[0], stored.action[1])
    np.testing.assert_allclose(trajectory.reward, stored.reward[1:, 0], atol=3e-7)
    assert trajectory.episode_return == pytest.approx(single.returns[RUN][3], rel=1e-6)


def test_windows_agree_with_packed_chains(single):
    from data.hindsight import chain
    from data.packing import pack

    made = WindowSampler(single, single.normalizer(), chunk=8, window=4, top=1.0, windows=16)
    batch = whole(made, 0, 5)
    packed = {
        episode: pack(
            chain([single.trajectory(episode, RUN)], scale=single.best_return(RUN)), chunk=8
        )
        for episode in single.training
    }
    for row in range(16):
        time = batch.timestep[row]
        found = [
            episode
            for episode, each in packed.items()
            if np.array_equal(each.action[time], batch.action[row])
        ]
        assert len(found) == 1
        each = packed[found[0]]
        np.testing.assert_allclose(batch.return_to_go[row], each.return_to_go[time], atol=1e-6)
        np.testing.assert_allclose(batch.reward[row], each.reward[time], atol=1e-6)
        normal = single.normalizer()(each.observation[time])
        np.testing.assert_array_equal(batch.observation[row], normal)


def test_first_steps_are_drawn_no_more_rarely_than_others(single):
    made = WindowSampler(single, single.normalizer(), chunk=8, window=4, top=1.0, windows=2_000)
    counts = np.bincount(whole(made, 0, 0).timestep.ravel(), minlength=10)
    # Ten places to begin at, three of them before the first of ten steps. Those are moved to it,
    # so that the first window is drawn four times as often as any other.
    expected = np.array([4, 4 + 1, 4 + 2, 4 + 3, 4, 4, 4, 3, 2, 1]) / 10
    np.testing.assert_allclose(counts / 2_000, expected, rtol=0.15)


def test_refusals_name_what_is_wrong(single, hidden, cheetah_store, monkeypatch):
    with pytest.raises(ValueError, match="one task"):
        WindowSampler(hidden, hidden.normalizer(), chunk=1, window=1, top=1.0, windows=1)
    with pytest.raises(ValueError, match=r"does not fit an episode of 83"):
        WindowSampler(single, single.normalizer(), chunk=8, window=11, top=1.0, windows=1)
    with pytest.raises(ValueError, match="17 trajectories needs as many training episodes"):
        sampler(single, trajectories=17)
    with pytest.raises(ValueError, match="5 trajectories needs as many held-out episodes"):
        sampler(single, trajectories=5, held_out=True)
    with pytest.raises(ValueError, match=r"84 environment steps does not fit an episode of 83"):
        sampler(single, chunk=84)
    for fits in ({"trajectories": 16}, {"held_out": True}, {"chunk": 83}):
        sampler(single, **fits)
    with pytest.raises(ValueError, match="holdout"):
        Pool.load(cheetah_store, (RUN,), holdout=0.9)
    with pytest.raises(
        ValueError, match=r"cannot be split with holdout=0\.03; collect at least 34"
    ):
        Pool.load(cheetah_store, (RUN,), holdout=0.03)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (0, r"fewer than 1 % of the training episodes in .* score under cheetah_run;"),
        (1e-32, r"under cheetah_run: .* is 1e-32, expected at least 1;"),
        (0.99, r"under cheetah_run: .* is 0\.99, expected at least 1;"),
    ],
)
def test_returns_that_nothing_can_be_scaled_by_are_refused(
    cheetah_store, monkeypatch, value, fault
):
    """Tolerances with Gaussian tails pay something for nothing."""
    monkeypatch.setattr(relabel, "returns", lambda store, task: np.full(len(store), value))
    with pytest.raises(ValueError, match=fault):
        Pool.load(cheetah_store, (RUN,))


def test_episodes_are_held_out_evenly_at_any_fraction():
    every_fifth = np.arange(1_000) % 5 == 4
    np.testing.assert_array_equal(spread(1_000, 0.2), every_fifth)
    for fraction in (0, 0.01, 0.1, 0.25, 0.29, 0.3, 1 / 3, 0.4, 0.5):
        held_out = spread(1_000, fraction)
        assert held_out.sum() == np.floor(1_000 * fraction + 1e-9)
        for stretch in np.split(held_out, 10):
            assert abs(stretch.sum() - 100 * fraction) < 1


def test_the_normalizer_survives_json_and_constant_dimensions():
    values = np.random.default_rng(0).normal(3, 2, (1000, 3)).astype(np.float32)
    values[:, 1] = 5
    normalizer = Normalizer.fit([values])
    normal = normalizer(values)
    np.testing.assert_allclose(normal.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(normal.std(axis=0), [1, 0, 1], atol=1e-4)
    again = Normalizer.from_json(normalizer.to_json())
    np.testing.assert_array_equal(again(values), normal)


def test_the_normalizer_is_to_the_bit_that_of_all_observations_at_once(single):
    made = single.normalizer()
    whole = np.concatenate([single.store[episode].observation for episode in single.training])
    np.testing.assert_array_equal(made.mean, whole.mean(0, dtype=np.float64).astype(np.float32))
    deviation = np.maximum(whole.std(0, dtype=np.float64), 1e-3).astype(np.float32)
    np.testing.assert_array_equal(made.deviation, deviation)


def test_a_batch_lies_on_the_mesh_as_steps(hidden):
    mesh = ring.make_mesh(data=2, ring=4)
    made = sampler(hidden, fixed=True)
    there = placed(made, mesh, 0, 0)
    rows, length = there.order.shape
    assert length % 8 == 0
    shard = there.observation.addressable_shards[0].data
    assert shard.shape == (rows // 2, length // 4, 17)
    assert len(there.order.sharding.device_set) == 8
    # Zigzag: the first device of the ring has the first steps and the last ones.
    first = there.order.addressable_shards[0].data[0].tolist()
    assert first == [0, 1, 2, 3, 4, 5, *[each if each < 44 else -1 for each in range(42, 48)]]
    assert_equal(there, place(whole(made, 0, 0), mesh))
    with pytest.raises(ValueError, match="3 chains do not divide"):
        place(jax.tree.map(lambda array: array[:3], whole(made, 0, 0)), mesh)


def test_a_process_builds_only_its_own_rows_and_steps(hidden):
    """What the devices of one of two processes would ask for: half the rows, or half the ring."""
    made = sampler(hidden, fixed=True)
    for data, size in ((2, 4), (1, 8)):
        whole_batch = placed(made, ring.make_mesh(data=data, ring=size), 0, 0)
        here = jax.devices()[:4]
        index = whole_batch.order.sharding.devices_indices_map((4, 48))
        rows = np.unique([np.arange(4)[index[device][0]] for device in here])
        steps = np.unique([np.arange(48)[index[device][1]] for device in here])
        assert len(rows) * len(steps) == 96  # of 4 × 48
        part = made.part(0, 0, rows, positions(44, size, "zigzag")[steps])
        for name, array in part._asdict().items():
            expected = np.asarray(getattr(whole_batch, name))[np.ix_(rows, steps)]
            np.testing.assert_array_equal(array, expected, err_msg=name)


STRUCTURE = {"timestep", "trajectory", "order", "chain", "loss_mask"}
PREVIOUS = {"previous_action", "previous_reward", "previous_completion"}


@pytest.mark.parametrize(
    ("change", "may_differ"),
    [
        ({"relabel": "own"}, {"return_to_go", "completion", "previous_completion"}),
        ({"context": "shuffled"}, set(Batch._fields) - STRUCTURE),
        ({"context": "descending"}, set(Batch._fields) - STRUCTURE),
        ({"top": 1.0}, set(Batch._fields) - STRUCTURE),
        ({"loss_on": "all"}, {"loss_mask"}),
        ({"index_range": 9}, {"trajectory"}),
        ({"cross_episode": False}, PREVIOUS),
    ],
)
def test_a_switch_changes_nothing_but_what_it_is_about(single, change, may_differ):
    before, after = (
        whole(sampler(single, fixed=True, batch_tokens=400, **each), 0, 3) for each in ({}, change)
    )
    differing = {
        name
        for name, left, right in zip(Batch._fields, before, after, strict=True)
        if not np.array_equal(left, right)
    }
    assert differing and differing <= may_differ
    last = before.trajectory == 3
    if "context" in change:  # the best stays last, whatever the order before it
        for name in set(Batch._fields) - PREVIOUS:
            np.testing.assert_array_equal(getattr(after, name)[last], getattr(before, name)[last])
    if "cross_episode" in change:
        first = before.timestep == 0
        assert not any(getattr(after, name)[first].any() for name in PREVIOUS)
        for name in PREVIOUS:
            np.testing.assert_array_equal(
                getattr(after, name)[~first], getattr(before, name)[~first]
            )
    if "index_range" in change:
        rows = after.trajectory[:, ::11]
        assert (np.diff(rows) > 0).all() and rows.max() <= 8 and len(np.unique(rows, axis=0)) > 1


def test_n_drawn_or_fixed_differ_in_nothing_where_n_is_the_same(single):
    fixed, drawn = sampler(single, fixed=True), sampler(single)
    [step, *_] = [step for step in range(50) if drawn.trajectories_at(0, step) == 4]
    assert_equal(whole(fixed, 0, step), whole(drawn, 0, step))


def test_hidden_chains_are_rewarded_by_their_own_task_on_its_own_scale(hidden):
    made = sampler(hidden, fixed=True, top=1.0, batch_tokens=400)
    batch = whole(made, 0, 0)
    drawn = [made.draw(0, 0, row, 4) for row in range(len(batch.order))]
    assert {draw.task for draw in drawn} == {RUN, BACK}
    for row, (task, episodes) in enumerate(drawn):
        scale = hidden.best_return(task)
        returns = np.sort(hidden.returns[task][episodes]) / scale
        np.testing.assert_allclose(batch.return_to_go[row, ::11, 0], returns[-1], rtol=1e-5)
        earned = batch.reward[row].reshape(4, 11).sum(axis=1) * 4 / 11
        np.testing.assert_allclose(earned, returns, rtol=1e-5)


def test_held_out_batches_are_never_trained_on(single):
    made = sampler(single, held_out=True, fixed=True, trajectories=4)
    drawn = {int(each) for row in range(30) for each in made.draw(0, 0, row, 4).episodes}
    assert drawn == set(single.held_out.tolist())
