import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from exorl import suite
from exorl.environments import make
from exorl.tasks import TASKS, TaskError

NAMES = tuple(TASKS)


def rollout(environment, seed, steps):
    environment.reset(seed=seed)
    rng = np.random.default_rng(0)
    shape = environment.action_space.shape
    return [environment.step(rng.uniform(-1, 1, shape).astype(np.float32)) for _ in range(steps)]


@pytest.mark.parametrize("name", NAMES)
def test_gymnasium_accepts_it(name):
    with warnings.catch_warnings():
        # Velocities have no bounds; gymnasium's own MuJoCo environments draw this remark too.
        warnings.filterwarnings("ignore", r".*Box observation space m\w+ value is -?infinity")
        check_env(make(name), skip_render_check=True)  # nothing to render


@pytest.mark.parametrize("name", NAMES)
def test_observations_rewards_and_physics_fit_their_spaces(name):
    environment, task = make(name), TASKS[name]
    observation, info = environment.reset(seed=1)
    assert environment.observation_space.contains(observation)
    assert info["physics"].shape == (task.physics_dim,)
    assert isinstance(environment.action_space, gymnasium.spaces.Box)
    assert environment.action_space.dtype == np.float32
    for observation, reward, terminated, truncated, info in rollout(environment, 1, 50):
        assert observation.shape == (task.observation_dim,) and observation.dtype == np.float32
        assert np.isfinite(observation).all()
        assert isinstance(reward, float) and 0 <= reward <= 1
        assert info["physics"].dtype == np.float64
        assert not terminated and not truncated


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_is_bitwise_the_same_episode(name):
    first, second = make(name, seed=5), make(name, seed=9)
    start, _ = first.reset()  # by the seed of make
    again, _ = second.reset(seed=5)
    np.testing.assert_array_equal(start, again)
    for one, other in zip(rollout(first, 3, 60), rollout(second, 3, 60), strict=True):
        np.testing.assert_array_equal(one[4]["physics"], other[4]["physics"])
        assert one[1] == other[1]
    follow, _ = first.reset()
    assert not np.array_equal(start, follow)


@pytest.mark.parametrize("name", NAMES)
def test_observations_keep_dm_controls_order(name):
    ours, theirs = make(name), suite.load(name, 4)
    start, _ = ours.reset(seed=4)
    parts = theirs.reset().observation
    np.testing.assert_array_equal(
        start, np.concatenate([np.ravel(part) for part in parts.values()], dtype=np.float32)
    )


def test_episodes_are_truncated_at_the_limit_and_never_terminated():
    environment = make("cartpole_swingup")
    ends = [
        (terminated, truncated) for *_, terminated, truncated, _ in rollout(environment, 0, 1000)
    ]
    assert ends == [(False, False)] * 999 + [(False, True)]
    with pytest.raises(RuntimeError, match="call reset"):
        environment.step(np.zeros(1, np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_gymnasium_makes_it_by_its_id(name):
    environment = gymnasium.make(f"exoring/{name}-v0", seed=3)
    assert environment.unwrapped.task == TASKS[name]
    observation, _ = environment.reset()
    np.testing.assert_array_equal(observation, make(name, seed=3).reset()[0])


def test_workers_build_their_own_arm():
    """Manipulation environments can't be pickled, so that processes must make them."""
    name = "jaco_reach_top_left"
    vector = gymnasium.make_vec(
        f"exoring/{name}-v0", 2, "async", vector_kwargs={"context": "spawn"}
    )
    try:
        start, _ = vector.reset(seed=[5, 6])
        actions = np.random.default_rng(0).uniform(-1, 1, (2, 9)).astype(np.float32)
        observation, reward, *_, info = vector.step(actions)
    finally:
        vector.close()
    for i, seed in enumerate((5, 6)):
        alone = make(name)
        np.testing.assert_array_equal(start[i], alone.reset(seed=seed)[0])
        again = alone.step(actions[i])
        np.testing.assert_array_equal(observation[i], again[0])
        assert reward[i] == again[1]
        np.testing.assert_array_equal(info["physics"][i], again[4]["physics"])


def test_actions_are_clipped_and_checked():
    environment, other = make("cheetah_run"), make("cheetah_run")
    environment.reset(seed=0), other.reset(seed=0)
    clipped = environment.step(np.full(6, 7, np.float32))
    full = other.step(np.ones(6, np.float32))
    np.testing.assert_array_equal(clipped[0], full[0])
    with pytest.raises(ValueError, match="finite"):
        environment.step(np.full(6, np.nan, np.float32))
    with pytest.raises(ValueError, match=r"shape \(5,\), expected \(6,\)"):
        environment.step(np.zeros(5, np.float32))


def test_actions_are_scaled_to_the_motors_range():
    low, high = np.array([-1.0, -0.8]), np.array([1.1, 0.8])
    ends = suite.scaling(low, high)(np.array([[-1, -1], [1, 1], [0, 0.5]], np.float32))
    np.testing.assert_allclose(ends, [low, high, [0.05, 0.4]])
    for name in ("quadruped_walk", "jaco_reach_top_left"):
        environment = suite.load(name, 0)
        environment.reset()
        motors, ours = environment.action_spec(), make(name)
        ours.reset(seed=0)
        assert (np.abs(motors.maximum) != 1).any()
        highest = environment.step(motors.maximum).observation.values()
        np.testing.assert_array_equal(
            ours.step(np.ones(motors.shape, np.float32))[0],
            np.concatenate(list(highest), axis=None, dtype=np.float32),
        )
    action = np.array([0.1, -0.3], np.float32)
    np.testing.assert_array_equal(suite.scaling(-np.ones(2), np.ones(2))(action), action)


def test_run_backward_starts_as_run_and_pays_the_other_direction():
    run, back = make("cheetah_run"), make("cheetah_run_backward")
    for one, other in zip(rollout(run, 2, 300), rollout(back, 2, 300), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        assert one[1] == 0 or other[1] == 0


def test_unknown_tasks_are_refused():
    with pytest.raises(TaskError, match="did you mean 'cheetah_run'"):
        make("cheetah_rum")


@pytest.mark.parametrize("problem", ["version", "fields"])
def test_a_mujoco_that_does_not_fit_is_named_with_the_fix(monkeypatch, problem):
    if problem == "version":
        versions = {"mujoco": "4.0.0", "dm-control": "1.0.50"}
        monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    else:

        def fail(*args, **kwargs):
            raise AttributeError("'MjModel' object has no attribute 'flex_vertedge'")

        monkeypatch.setattr("dm_control.suite.load", fail)
    with pytest.raises(
        suite.VersionError, match=r'dm_control 1\S+ .* mujoco \d.*"mujoco>=3.17,<4"'
    ):
        suite.load("walker_walk", 0)


def test_other_attribute_errors_are_not_taken_for_it(monkeypatch):
    def fail(*args, **kwargs):
        raise AttributeError("something else")

    monkeypatch.setattr("dm_control.suite.load", fail)
    with pytest.raises(AttributeError, match="something else"):
        suite.load("walker_walk", 0)


def test_loading_is_silent_without_a_display_and_importing_changes_nothing(monkeypatch):
    for variable in ("MUJOCO_GL", "DISPLAY"):
        monkeypatch.delenv(variable, raising=False)
    program = (
        "import os, sys, exorl\n"
        "assert 'MUJOCO_GL' not in os.environ and 'mujoco' not in sys.modules\n"
        "exorl.make('cheetah_run').reset(seed=0)\n"
        "exorl.make('cheetah_run_backward').reset(seed=0)\n"
        "jaco = exorl.make('jaco_reach_top_left')\n"
        "jaco.reset(seed=0)\n"
        "jaco.step(jaco.action_space.sample())\n"
        "from absl import logging\n"
        "logging.warning('still heard')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr.splitlines() == ["WARNING:absl:still heard"]
