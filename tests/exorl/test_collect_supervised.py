"""The collector that learns: interrupted anywhere, it ends in the same numbers."""

import dataclasses

import numpy as np
import pytest

from exorl.collect import CollectConfig, LearnerConfig, collect, supervised
from exorl.episodes import FIELDS, find, read

TINY = LearnerConfig(width=8, batch=8, uniform_rounds=1, updates_per_step=0.01)


def config(folder, rounds=3, learner=TINY, seed=0):
    steps = 1000 * learner.episodes_per_round * rounds
    return CollectConfig("cheetah_run", "supervised", folder, steps, seed, learner=learner)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return collect(config(tmp_path_factory.mktemp("uninterrupted")))


def assert_same_numbers(one, other):
    assert [file.index for file in find(one)] == [file.index for file in find(other)]
    for a, b in zip(find(one), find(other), strict=True):
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(read(a.path), name), getattr(read(b.path), name))
    with np.load(one / supervised.STATE) as a, np.load(other / supervised.STATE) as b:
        assert a.files == b.files
        for name in a.files:
            np.testing.assert_array_equal(a[name], b[name])


def test_more_rounds_later_are_the_same_as_at_once(uninterrupted, tmp_path):
    for rounds in (1, 2, 3):
        collect(config(tmp_path, rounds))
    assert_same_numbers(tmp_path, uninterrupted)


@pytest.mark.parametrize("calls", [1, 3])  # within a round, at its very end
def test_a_crash_is_made_good_by_the_next_call(uninterrupted, tmp_path, monkeypatch, calls):
    count = 0

    def crash(*args):
        nonlocal count
        count += 1
        if count > calls:
            raise OSError("disk full")
        return original(*args)

    name = "write" if calls == 3 else "_save"
    original = getattr(supervised, name)
    monkeypatch.setattr(supervised, name, crash)
    with pytest.raises(OSError, match="disk full"):
        collect(config(tmp_path))
    monkeypatch.undo()
    collect(config(tmp_path))
    assert_same_numbers(tmp_path, uninterrupted)


def test_what_is_complete_is_left_alone(uninterrupted):
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.iterdir()}
    collect(config(uninterrupted, rounds=2))
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.iterdir()} == before


def test_the_first_round_is_uniform_and_the_next_is_the_agent_with_noise(uninterrupted):
    first, second = (
        np.stack([read(file.path).action[1:] for file in find(uninterrupted)[part]])
        for part in (slice(0, 2), slice(2, 4))
    )
    np.testing.assert_allclose(first.std(), 1 / np.sqrt(3), atol=0.02)
    jumps = np.diff(second, axis=1).std() / np.sqrt(2)  # the noise, once the agent is smooth
    np.testing.assert_allclose(jumps, TINY.noise, atol=0.03)


def test_a_lost_episode_is_refused(tmp_path):
    collect(config(tmp_path, rounds=1))
    find(tmp_path)[1].path.unlink()
    with pytest.raises(FileNotFoundError, match="episode 1 is gone"):
        collect(config(tmp_path, rounds=2))


def test_another_learner_is_refused(uninterrupted):
    other = dataclasses.replace(TINY, noise=0.3)
    with pytest.raises(FileExistsError, match=r"learner\.noise = 0\.2.*0\.3"):
        collect(config(uninterrupted, learner=other))


@pytest.mark.slow
def test_it_learns_to_run(tmp_path):
    collect(CollectConfig("cheetah_run", "supervised", tmp_path, 40_000))
    returns = [read(file.path).reward.sum() for file in find(tmp_path)]
    assert max(returns[:4]) < 20  # uniformly random
    assert np.mean(returns[-4:]) > 60
