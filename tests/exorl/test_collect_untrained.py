"""Random and structured episodes: reproducible one by one, resumable, and true to MuJoCo."""

import subprocess
import sys

import numpy as np
import pytest

from exorl import rewards, suite
from exorl.collect import CollectConfig, LearnerConfig, collect, untrained
from exorl.episodes import FIELDS, find, read
from exorl.tasks import TaskError

TASK = "cheetah_run"


def collected(folder, method="structured", episodes=4, **settings):
    collect(CollectConfig(TASK, method, folder, 1000 * episodes, **settings))
    return [read(file.path) for file in find(folder)]


def assert_same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@pytest.fixture(scope="module")
def structured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("structured")
    return folder, collected(folder, processes=1)


@pytest.mark.parametrize("batch", [1, 3])
def test_episodes_do_not_depend_on_how_many_are_played_side_by_side(
    structured, tmp_path, monkeypatch, batch
):
    monkeypatch.setattr(untrained, "BATCH", batch)
    assert_same(collected(tmp_path, processes=1), structured[1])


def test_episodes_do_not_depend_on_the_number_of_processes(structured, tmp_path):
    assert_same(collected(tmp_path, processes=2), structured[1])


def test_another_seed_gives_other_episodes(structured, tmp_path):
    other = collected(tmp_path, episodes=2, processes=1, seed=1)
    for a, b in zip(structured[1], other, strict=False):
        assert not np.array_equal(a.physics[0], b.physics[0])
        assert not np.array_equal(a.action, b.action)


def test_existing_episodes_are_kept_and_missing_ones_made_again(structured, tmp_path):
    collected(tmp_path, episodes=3)
    files = find(tmp_path)
    kept = {file.path.name: file.path.stat() for file in files if file.index != 1}
    files[1].path.unlink()
    assert_same(collected(tmp_path, episodes=4), structured[1])
    for name, before in kept.items():
        after = (tmp_path / name).stat()
        assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"task": "cheetah_run_backward"}, "task"),
        ({"method": "random"}, "method"),
        ({"seed": 1}, "seed"),
    ],
)
def test_a_folder_of_another_collection_is_refused(structured, change, name):
    settings = {"task": TASK, "method": "structured", "out": structured[0], "steps": 4000}
    with pytest.raises(FileExistsError, match=rf"collector\.json.*{name} = .*{change[name]}"):
        collect(CollectConfig(**(settings | change)))


def test_episodes_of_unknown_origin_are_refused(tmp_path):
    collected(tmp_path, episodes=1)
    (tmp_path / "collector.json").unlink()
    with pytest.raises(FileExistsError, match=r"no collector\.json"):
        collected(tmp_path, episodes=2)


def test_settings_nobody_can_mean_are_refused(tmp_path):
    with pytest.raises(ValueError, match="steps is 0"):
        CollectConfig(TASK, "random", tmp_path, steps=0)
    with pytest.raises(ValueError, match="method is 'randon', expected one of random, structured"):
        CollectConfig(TASK, "randon", tmp_path)
    with pytest.raises(ValueError, match="batch is 0"):
        LearnerConfig(batch=0)
    with pytest.raises(TaskError, match="cheetah_run"):
        collect(CollectConfig("cheetah_runn", "random", tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("index", [0, 1])  # a rhythm and a network
def test_a_row_holds_the_action_and_the_state_and_reward_it_led_to(structured, index):
    episode = structured[1][index]
    physics = suite.load(TASK, seed=0).physics
    errors = []
    for t in range(1, len(episode) + 1, 7):
        with physics.reset_context():
            physics.set_state(episode.physics[t - 1])
        physics.set_control(episode.action[t])
        physics.step()
        errors.append(np.abs(physics.get_state() - episode.physics[t]).max())
    # Not zero: where the solver starts is not part of the state.
    assert np.median(errors) < 1e-6
    assert np.max(errors) < 1e-2
    paid = rewards.reward(TASK, episode.observation, episode.action, episode.physics)
    np.testing.assert_array_equal(episode.reward[1:, 0], paid[1:])
    assert episode.reward[0, 0] == 0
    assert not episode.action[0].any()
    assert np.abs(episode.action).max() <= 1
    assert (episode.discount == 1).all()


def test_random_actions_are_uniform_and_structured_ones_go_further(structured, tmp_path):
    uniform = collected(tmp_path, method="random", episodes=4)
    action = np.stack([episode.action[1:] for episode in uniform])
    assert abs(action.mean()) < 0.02
    np.testing.assert_allclose(action.std(), 1 / np.sqrt(3), atol=0.01)

    def furthest(episodes):
        return max(np.ptp(episode.physics[:, 0]) for episode in episodes)  # metres on the ground

    assert furthest(structured[1]) > 2 * furthest(uniform)


def test_collectors_that_do_not_learn_start_without_jax():
    code = "import sys, exorl.collect.untrained; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
