import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from agent.statistics import (
    SUMMARIES,
    area,
    best_of,
    bootstrap,
    improvement,
    iqm,
    profile,
    stratified,
)


def test_summaries_of_two_chains_by_hand():
    returns = np.array([[1.0, 5.0, 3.0], [2.0, 2.0, 8.0]])
    found = {name: summary(returns).tolist() for name, summary in SUMMARIES.items()}
    assert found == {"first": [1, 2], "last": [3, 8], "mean": [3, 4], "max": [5, 8]} | {
        "area": [3.5, 3.5]
    }


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


def test_the_area_under_a_curve_is_in_units_of_a_return():
    assert area(np.array([[0.0, 2.0, 4.0], [1.0, 1.0, 7.0]])).tolist() == [2.0, 2.5]
    assert area(np.array([[3.0]])).tolist() == [3.0]


def test_the_interquartile_mean_is_of_the_middle_half():
    assert iqm(np.array([100.0, 3.0, 1.0, 2.0])) == 2.5
    assert iqm(np.arange(10.0)) == 4.5  # of 2 … 7
    assert iqm(np.array([5.0])) == 5.0


def test_the_best_of_n_by_hand_and_of_normals_as_tabulated():
    assert best_of(np.array([1.0, 2.0, 4.0]), 1) == pytest.approx(7 / 3)
    assert best_of(np.array([4.0, 1.0, 2.0]), 2) == pytest.approx((2 + 4 + 4) / 3)
    assert best_of(np.array([4.0, 1.0, 2.0]), 3) == 4.0
    with pytest.raises(ValueError, match="best of 4 of 3"):
        best_of(np.arange(3.0), 4)
    # Expected largest of n standard normals: Harter 1961, Biometrika 48, table 1.
    normals = stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000)
    for n, expected in ((2, 0.56419), (4, 1.02938), (10, 1.53875), (32, 2.06967)):
        assert best_of(normals, n) == pytest.approx(expected, abs=2e-3)


def test_the_probability_of_improvement_is_mann_whitneys():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 5, 13).astype(float), rng.integers(0, 4, 9).astype(float)
    expected = stats.mannwhitneyu(x, y).statistic / (13 * 9)
    assert improvement([[x[:6], x[6:]]], [[y]]) == pytest.approx(expected)
    assert improvement([[x], [y]], [[y], [x]]) == pytest.approx(0.5)  # mean over tasks


def test_a_performance_profile_falls_from_one_to_zero():
    values = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert profile(values, np.array([0.0, 1.0, 2.5, 4.0])).tolist() == [1.0, 0.75, 0.5, 0.0]


def test_seeds_are_resampled_from_five_on_and_tasks_never():
    """Seeds far apart, chains alike: only resampling seeds sees how far."""
    seeds = [np.full(10, float(value)) for value in range(0, 100, 20)]
    alone = stratified([seeds[:4]], np.mean)
    assert alone.low == alone.mean == alone.high == 30.0
    many = stratified([seeds], np.mean)
    assert many.mean == 40.0 and many.low < 25 and many.high > 55
    tasks = stratified([[np.zeros(10)], [np.full(10, 100.0)]], np.mean)
    assert tasks.low == tasks.high == 50.0
