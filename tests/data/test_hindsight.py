import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from data.hindsight import Trajectory, ascending, chain, returns_to_go

rewards = arrays(np.float32, st.integers(1, 30), elements=st.floats(0, 1, width=32))


def trajectory(reward: np.ndarray) -> Trajectory:
    length = len(reward)
    return Trajectory(
        np.zeros((length, 3), np.float32), np.zeros((length, 2), np.float32), np.asarray(reward)
    )


@given(st.lists(rewards, min_size=1, max_size=6))
def test_a_chain_ascends_and_aims_at_its_best(drawn):
    made = chain([trajectory(reward) for reward in drawn])
    returns = [each.episode_return for each in made.trajectories]
    assert returns == sorted(t.astype(np.float64).sum() for t in drawn)
    assert made.targets == (returns[-1],) * len(drawn)


@given(rewards, st.floats(0, 1000))
def test_returns_to_go_obey_their_recursion(reward, target):
    to_go = returns_to_go(reward, target)
    assert to_go[0] == np.float32(target)
    # R̂_{t+1} = R̂_t − r_t, in float64 from the start: no drift over the episode.
    expected = target
    for t, earned in enumerate(reward):
        np.testing.assert_allclose(to_go[t], expected, rtol=1e-6, atol=1e-6)
        expected -= float(earned)


def test_ties_keep_their_order():
    assert ascending([2.0, 1.0, 2.0, 1.0]).tolist() == [1, 3, 0, 2]


def test_an_asked_for_target_replaces_the_best():
    made = chain([trajectory(np.float32([1, 1]))], target=7.0, scale=2.0)
    assert (made.targets, made.scale) == ((7.0,), 2.0)


@given(st.lists(rewards, min_size=1, max_size=6), st.sampled_from(["descending", "shuffled"]))
def test_whatever_the_order_of_the_context_the_best_is_last(drawn, context):
    made = chain(
        [trajectory(each) for each in drawn], context=context, rng=np.random.default_rng(0)
    )
    returns = [each.episode_return for each in made.trajectories]
    assert returns[-1] == max(returns)
    assert sorted(returns) == sorted(t.astype(np.float64).sum() for t in drawn)
    if context == "descending":
        assert returns[:-1] == sorted(returns[:-1], reverse=True)


def test_relabelled_with_its_own_return_a_trajectory_reaches_its_target():
    drawn = [trajectory(np.full(3, value, np.float32)) for value in (2, 1, 3)]
    assert chain(drawn, relabel="own").targets == (3.0, 6.0, 9.0)
    assert chain(drawn, relabel="own", target=5.0).targets == (5.0, 5.0, 5.0)


def test_shuffling_needs_a_generator():
    with pytest.raises(ValueError, match="random generator"):
        chain([trajectory(np.float32([1]))], context="shuffled")


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_a_useless_scale_is_refused(scale):
    with pytest.raises(ValueError, match="positive number"):
        chain([trajectory(np.float32([1]))], scale=scale)


def test_an_empty_chain_is_refused():
    with pytest.raises(ValueError, match="at least one trajectory"):
        chain([])
