import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.statistics import SUMMARIES, bootstrap


def test_summaries_of_two_chains_by_hand():
    returns = np.array([[1.0, 5.0, 3.0], [2.0, 2.0, 8.0]])
    found = {name: summary(returns).tolist() for name, summary in SUMMARIES.items()}
    assert found == {"first": [1, 2], "last": [3, 8], "mean": [3, 4], "max": [5, 8]}


def test_the_interval_covers_as_often_as_it_claims():
    rng = np.random.default_rng(0)
    covered = 0
    for repeat in range(300):
        estimate = bootstrap(rng.normal(3, 2, 30), seed=repeat, resamples=500)
        covered += estimate.low <= 3 <= estimate.high
    assert 0.89 <= covered / 300 <= 0.98  # the percentile bootstrap is a little narrow at n = 30


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=20))
def test_the_interval_encloses_the_mean_and_repeats(values):
    estimate = bootstrap(np.array(values), resamples=100)
    assert estimate == bootstrap(np.array(values), resamples=100)
    assert min(values) - 1e-9 <= estimate.low <= estimate.high <= max(values) + 1e-9


@pytest.mark.parametrize("values", [[], [1.0, np.nan]])
def test_values_that_say_nothing_are_refused(values):
    with pytest.raises(ValueError, match="finite values"):
        bootstrap(np.array(values))
