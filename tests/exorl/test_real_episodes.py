"""Recorded ExoRL-format walker episodes, found through EXORING_REAL_EPISODES."""

import os
from pathlib import Path

import numpy as np
import pytest

from exorl import episodes, relabel
from exorl.domains import walker
from exorl.packing import pack
from exorl.tasks import task

FOLDER = os.environ.get("EXORING_REAL_EPISODES")

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(FOLDER is None, reason="EXORING_REAL_EPISODES is not set"),
]


@pytest.fixture(scope="module")
def real():
    files = episodes.find(Path(FOLDER or ""))
    return [episodes.read(file.path, task("walker_walk")) for file in files]


def test_row_0_is_the_dummy_row(real):
    for episode in real:
        assert len(episode) == 1000
        assert not episode.action[0].any() and episode.reward[0, 0] == 0
        assert (episode.discount == 1).all()


def test_observations_follow_from_the_states(real):
    for episode in real:
        observation = walker.observation(episode.physics)
        np.testing.assert_allclose(observation, episode.observation, rtol=0, atol=1e-5)


def test_relabelled_rewards_are_the_recorded_ones(tmp_path, real):
    store = pack([FOLDER or ""], tmp_path / "store", domain="walker")
    rewards = relabel.rewards(store, "walker_walk")
    np.testing.assert_allclose(rewards, store.field("reward")[:, 0], rtol=0, atol=3e-7)
    recorded = [episode.reward.sum(dtype=np.float64) for episode in real]
    np.testing.assert_allclose(relabel.returns(store, "walker_walk"), recorded, atol=1e-4)
    stand, run = relabel.returns(store, "walker_stand"), relabel.returns(store, "walker_run")
    assert (stand > recorded).all() and (run < recorded).all()
