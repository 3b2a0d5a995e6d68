import numpy as np
import pytest

from exorl import suite
from exorl.rewards import FORMULA_VERSION, reward
from exorl.tasks import TASKS, TaskError

NAMES = tuple(TASKS)


def random_rows(name, shape, seed=0):
    task, rng = TASKS[name], np.random.default_rng(seed)
    observation = rng.normal(size=(*shape, task.observation_dim)).astype(np.float32)
    action = rng.uniform(-1, 1, (*shape, task.action_dim)).astype(np.float32)
    return observation, action, rng.normal(size=(*shape, task.physics_dim))


@pytest.mark.parametrize("name", NAMES)
def test_any_leading_shape_gives_bounded_float32(name):
    rows = random_rows(name, (3, 4, 5))
    values = reward(name, *rows)
    assert values.shape == (3, 4, 5) and values.dtype == np.float32
    assert (values >= 0).all() and (values <= 1).all()
    one = reward(name, *(array[1, 2, 3] for array in rows))
    assert one.shape == () and one == values[1, 2, 3]


def test_a_row_is_paid_for_its_own_action_and_state():
    """ExoRL's row t: the action taken before, and the state it led to."""
    name = "cartpole_swingup"
    environment, rng = suite.load(name, 3), np.random.default_rng(3)
    environment.reset()
    states, actions, paid = [environment.physics.get_state()], [np.zeros(1)], [0.0]
    for _ in range(50):
        actions.append(rng.uniform(-1, 1, 1))
        paid.append(environment.step(actions[-1]).reward)
        states.append(environment.physics.get_state())
    states, actions, paid = np.array(states), np.array(actions), np.array(paid)
    nothing = np.zeros((51, 5))
    values = reward(name, nothing, actions, states)
    np.testing.assert_allclose(values[1:], paid[1:], atol=1e-7)
    late = reward(name, nothing[1:], actions[1:], states[:-1])
    early = reward(name, nothing[:-1], actions[1:], states[:-1])
    assert np.abs(late - paid[1:]).max() > 1e-4
    assert np.abs(early - paid[1:]).max() > 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_mode_exorl_is_upstreams_relabelling_which_forgets_the_control(name):
    environment = suite.load(name, 0)
    observation, action, physics = random_rows(name, (50,))
    upstream = []
    for state in physics:
        with environment.physics.reset_context():
            environment.physics.set_state(state)
        upstream.append(environment.task.get_reward(environment.physics))
    values = reward(name, observation, action, physics, mode="exorl")
    np.testing.assert_allclose(values, upstream, atol=1e-7)
    exact = reward(name, observation, action, physics)
    pays_for_force = name in ("cartpole_swingup", "cartpole_balance")
    assert np.array_equal(values, exact) != pays_for_force


def test_wrong_shapes_modes_and_tasks_are_refused():
    observation, action, physics = random_rows("cheetah_run", (7,))
    with pytest.raises(ValueError, match=r"action has shape \(6, 6\), expected \(7, 6\)"):
        reward("cheetah_run", observation, action[1:], physics)
    with pytest.raises(ValueError, match=r"physics has shape \(7, 17\), expected \(7, 18\)"):
        reward("cheetah_run", observation, action, physics[:, 1:])
    with pytest.raises(ValueError, match="mode is 'fast'"):
        reward("cheetah_run", observation, action, physics, mode="fast")  # type: ignore
    with pytest.raises(TaskError):
        reward("cheetah_fly", observation, action, physics)


# Sums over 1000 fixed random rows.
GOLDEN = {
    "cartpole_balance": 598.3465,
    "cartpole_balance_sparse": 17.0,
    "cartpole_swingup": 598.3465,
    "cartpole_swingup_sparse": 17.0,
    "cheetah_run": 40.8515,
    "cheetah_run_backward": 43.2347,
    "cheetah_walk": 201.1343,
    "cheetah_walk_backward": 209.9974,
    "cheetah_flip": 234.1713,
    "cheetah_flip_backward": 235.7204,
    "walker_stand": 683.1227,
    "walker_walk": 291.8398,
    "walker_run": 144.4216,
    "walker_flip": 321.4383,
}


def test_formulas_and_their_version_change_together():
    """Cached rewards are found by the version: if these values change, raise it."""
    assert FORMULA_VERSION == 1
    for name, expected in GOLDEN.items():
        values = reward(name, *random_rows(name, (1000,)))
        assert values.sum(dtype=np.float64) == pytest.approx(expected, abs=1e-3), name
