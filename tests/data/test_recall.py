import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.recall import KEY_BITS, RecallSampler
from data.sampling import whole


def sampler(**changes) -> RecallSampler:
    sizes = {"observation": 45, "action": 9, "trajectories": 4, "length": 25, "chains": 2}
    return RecallSampler(**{**sizes, "index_range": 16, **changes})


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(2, 9), length=st.integers(1, 40), seed=st.integers(0, 5), step=st.integers(0, 5)
)
def test_every_answer_was_shown_once_and_at_the_distance_named(n, length, seed, step):
    made = sampler(trajectories=n, length=length)
    batch, context = whole(made, seed, step), (n - 1) * length
    assert batch.order.shape == (2, n * length) == made.shape(seed, step)
    keys, values = batch.observation[..., :KEY_BITS], batch.observation[..., KEY_BITS:-1]
    np.testing.assert_array_equal(np.abs(keys), 1)
    np.testing.assert_array_equal(values[:, :context, :9], batch.action[:, :context])
    np.testing.assert_array_equal(values[:, context:], 0)  # what is asked for is not told
    np.testing.assert_array_equal(batch.observation[..., -1] > 0, batch.loss_mask > 0)
    for row in range(2):
        assert len(np.unique(keys[row, :context], axis=0)) == context
        distances = made.distances(seed, step, row)
        for at, distance in zip(range(context, n * length), distances, strict=True):
            shown = np.flatnonzero((keys[row, :context] == keys[row, at]).all(axis=1))
            assert shown == [at - distance]
            np.testing.assert_array_equal(batch.action[row, at], batch.action[row, shown[0]])


def test_every_part_of_the_context_is_asked_for_alike():
    made = sampler(trajectories=5, length=50)
    asked = made.questions(0, 0, 0).asked
    np.testing.assert_array_equal(np.sort(asked) // 4, np.arange(50))
    assert not np.array_equal(asked, np.sort(asked))


def test_bits_of_keys_and_values_are_even_and_unrelated():
    batch = whole(sampler(trajectories=100, length=100, index_range=128), 0, 0)
    shown = batch.observation[0, :-100, :41]
    correlation = shown.T @ shown / len(shown)
    assert np.abs(correlation - np.eye(41)).max() < 0.05  # 5 standard errors of 9,900
    assert np.abs(shown.mean(axis=0)).max() < 0.05


def test_a_batch_is_a_function_of_seed_step_and_row():
    made = sampler()
    batch, other = whole(made, 1, 2), whole(made, 1, 3)
    part = made.part(1, 2, np.array([1]), np.array([3, 99, 100]))
    np.testing.assert_array_equal(part.observation[0, :2], batch.observation[1, [3, 99]])
    np.testing.assert_array_equal(part.order, [[3, 99, -1]])
    assert not np.array_equal(batch.observation[0], batch.observation[1])
    assert not np.array_equal(batch.observation, other.observation)
    assert (np.diff(batch.trajectory) >= 0).all() and batch.trajectory.max() < 16
    assert [name for name in made.names(1, 2)] == ["chain 0: 75 pairs", "chain 1: 75 pairs"]


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(ValueError, match="the last asks"):
        sampler(trajectories=1)
    with pytest.raises(ValueError, match="no room for 32 bits of a key"):
        sampler(observation=41)
