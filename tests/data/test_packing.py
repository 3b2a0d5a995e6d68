import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.batches import Batch, positions, stack, take
from data.hindsight import Trajectory, chain
from data.packing import pack, steps_in


def numbered(index: int, length: int, scale: float = 1.0) -> Trajectory:
    """Every entry tells its trajectory and time: 100 · index + t."""
    t = 100 * index + np.arange(length, dtype=np.float32)
    return Trajectory(t[:, None] + 0.25, np.stack([t, -t], axis=1), (1 + index) * np.ones_like(t))


def test_a_chain_of_two_laid_out_by_hand():
    batch = pack(chain([numbered(1, 3), numbered(0, 3)], scale=2.0))
    # Ascending: trajectory 0 (return 3), then 1 (return 6); both aim at 6; scale 2.
    assert batch.return_to_go[:, 0].tolist() == [3.0, 2.5, 2.0, 3.0, 2.0, 1.0]
    assert batch.observation[:, 0].tolist() == [0.25, 1.25, 2.25, 100.25, 101.25, 102.25]
    assert batch.action[:, 0].tolist() == [0, 1, 2, 100, 101, 102]
    # An episode of 3 steps earns the scale with a reward of 2/3 a step: that is 1/4.
    assert batch.reward[:, 0].tolist() == [0.375, 0.375, 0.375, 0.75, 0.75, 0.75]
    # The first step of the second trajectory knows how the first one ended.
    assert batch.previous_action[:, 0].tolist() == [0, 0, 1, 2, 100, 101]
    assert batch.previous_reward[:, 0].tolist() == [0, 0.375, 0.375, 0.375, 0.75, 0.75]
    assert batch.timestep.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.trajectory.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.order.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.loss_mask.tolist() == [0, 0, 0, 1, 1, 1]
    # Only the best reaches the chain's target, in its last step, after which nothing follows.
    assert batch.completion[:, 0].tolist() == [0, 0, 0, 0, 0, 1]
    assert not batch.previous_completion.any()


def test_trajectories_that_reach_their_targets_are_complete():
    drawn = [numbered(1, 3), numbered(1, 3), numbered(0, 3)]
    batch = pack(chain(drawn))  # the best return is there twice
    assert batch.completion[:, 0].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 1]
    assert batch.previous_completion[:, 0].tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0]
    own = pack(chain(drawn, relabel="own"))
    assert own.completion[:, 0].tolist() == [0, 0, 1] * 3


def test_a_chunk_holds_the_start_all_actions_and_summed_rewards():
    batch = pack(chain([numbered(0, 5)]), chunk=2)
    assert batch.observation[:, 0].tolist() == [0.25, 2.25, 4.25]
    assert batch.return_to_go[:, 0].tolist() == [5, 3, 1]
    assert batch.action.tolist() == [[0, 0, 1, -1], [2, -2, 3, -3], [4, -4, 0, 0]]
    assert batch.reward[:, 0].tolist() == [1.5, 1.5, 0.75]
    assert batch.loss_mask.tolist() == [1, 1, 0]  # the last chunk is partial


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 7))
def test_nothing_is_lost_or_invented(lengths, chunk):
    trajectories = [numbered(index, length) for index, length in enumerate(lengths)]
    made = chain(trajectories)
    batch = pack(made, chunk=chunk)
    assert len(batch.order) == sum(steps_in(length, chunk) for length in lengths)
    for index, each in enumerate(made.trajectories):
        own = batch.trajectory == index
        actions = batch.action[own].reshape(-1, 2)
        np.testing.assert_array_equal(actions[: len(each)], each.action)
        assert not actions[len(each) :].any()
        np.testing.assert_allclose(4 * batch.reward[own].mean(), each.episode_return, rtol=1e-6)
        first = batch.return_to_go[own][0, 0]
        np.testing.assert_allclose(first, made.targets[index], rtol=1e-6)


def assert_equal(found: Batch, expected: Batch) -> None:
    for name, left, right in zip(Batch._fields, found, expected, strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 3),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_any_part_of_a_chain_can_be_built_without_the_rest(lengths, chunk, cross, random):
    made = chain([numbered(index, length) for index, length in enumerate(lengths)])
    options = {"chunk": chunk, "cross_episode": cross, "loss_on": "all", "row": 3}
    whole = pack(made, **options)
    steps = np.array(random.sample(range(len(whole.order) + 3), k=random.randint(1, 4)))
    part = pack(made, steps=steps, **options)
    expected = take(stack([whole]), np.array([0]), steps)
    expected = Batch(*(array[0] for array in expected))
    assert_equal(part, expected)


def test_padding_is_marked_and_carries_no_loss():
    batch = take(stack([pack(chain([numbered(0, 5)]))]), np.array([0]), np.arange(8))
    assert batch.order[0].tolist() == [0, 1, 2, 3, 4, -1, -1, -1]
    assert batch.loss_mask[0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert batch.observation.shape == (1, 8, 1)


def test_steps_are_laid_out_along_the_ring_and_padded_to_even_shards():
    assert positions(5, 1, "zigzag").tolist() == [0, 1, 2, 3, 4]
    assert positions(5, 2, "contiguous").tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert positions(5, 2, "zigzag").tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@pytest.mark.parametrize(("length", "chunk", "steps"), [(1000, 8, 125), (10, 4, 3), (1, 8, 1)])
def test_steps_in(length, chunk, steps):
    assert steps_in(length, chunk) == steps
