import functools

import numpy as np
import pytest

from exorl import backends, suite
from exorl.domains import DOMAINS
from exorl.rewards import FORMULA_VERSION, reward
from exorl.tasks import TASKS, TaskError, domain_tasks

NAMES = tuple(TASKS)


def random_rows(name, shape, seed=0):
    task, rng = TASKS[name], np.random.default_rng(seed)
    observation = rng.normal(size=(*shape, task.observation_dim)).astype(np.float32)
    action = rng.uniform(-1, 1, (*shape, task.action_dim)).astype(np.float32)
    physics = rng.normal(size=(*shape, task.physics_dim))
    if "reach" in name:  # within reach of the goals
        observation, physics = observation / 10, physics / 10
    return observation, action, physics


@functools.cache
def played_rows(domain, count):
    """Observations, actions and states of a random policy in dm_control, and what they earn.

    The rewards are those of the domain's first task, as the environment pays them.
    """
    task = domain_tasks(domain)[0]
    environment, rng = suite.load(task.name, 0), np.random.default_rng(0)
    motors, rows = environment.action_spec(), []
    scale = suite.scaling(motors.minimum, motors.maximum)
    environment.reset()
    while len(rows) < count:
        action = rng.uniform(-1, 1, task.action_dim)
        step = environment.step(scale(action))
        if step.first():
            continue
        observation = np.concatenate([np.ravel(part) for part in step.observation.values()])
        rows.append((observation, action, environment.physics.get_state(), step.reward))
    return [np.array(column) for column in zip(*rows, strict=True)]


@functools.cache
def thrown_rows(domain, count):
    """Actions and states far from any episode: they reach every branch of the formulas."""
    task, rng = domain_tasks(domain)[0], np.random.default_rng(1)
    observation = np.zeros((count, task.observation_dim))
    if domain in ("jaco", "point_mass_maze"):
        # Of many, those nearest to a goal: elsewhere nothing is earned.
        physics = rng.normal(size=(40 * count, task.physics_dim))
        place = np.stack(backends.measure(task, physics), axis=-1)
        goals = np.array(list(DOMAINS[domain].TARGETS.values()))
        distance = np.linalg.norm(place[:, None] - goals, axis=-1).min(axis=-1)
        nearest = np.argsort(distance)[:count]
        physics, place = physics[nearest], place[nearest]
        if domain == "jaco":
            observation[:, 30:33] = place  # which only MuJoCo can tell from the state
    else:
        spread = rng.choice([0.01, 1.0, 10.0], (count, 1))
        physics = spread * rng.normal(size=(count, task.physics_dim))
    return observation, rng.uniform(-1, 1, (count, task.action_dim)), physics


def equal_back_ends(name, rows, atol=1e-6):
    closed = reward(name, *rows)
    np.testing.assert_allclose(reward(name, *rows, backend="mujoco"), closed, rtol=0, atol=atol)
    asked = reward(name, *rows, backend="dm_control")
    np.testing.assert_allclose(asked, closed, rtol=0, atol=atol)
    return closed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_back_ends_agree(name, count):
    """Closed form, MuJoCo and dm_control, over states of episodes and states far from any."""
    domain = TASKS[name].domain
    *played, paid = played_rows(domain, count)
    values = equal_back_ends(name, played)
    if name == domain_tasks(domain)[0].name:
        np.testing.assert_allclose(values, paid, rtol=0, atol=1e-7)
    thrown = thrown_rows(domain, count)
    values = equal_back_ends(name, thrown)
    # The comparison has something to compare.
    assert np.ptp(values) > 0.3 and len(np.unique(values)) > (1 if "sparse" in name else 20)


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
    rows = thrown_rows(TASKS[name].domain, 500)
    values = reward(name, *rows, mode="exorl")
    for backend in ("mujoco", "dm_control"):
        same = reward(name, *rows, mode="exorl", backend=backend)
        np.testing.assert_allclose(values, same, atol=1e-6)
    pays_for_force = name in ("cartpole_swingup", "cartpole_balance") or "maze" in name
    assert np.array_equal(values, reward(name, *rows)) != pays_for_force


def test_wrong_shapes_modes_and_tasks_are_refused():
    observation, action, physics = random_rows("cheetah_run", (7,))
    with pytest.raises(ValueError, match=r"action has shape \(6, 6\), expected \(7, 6\)"):
        reward("cheetah_run", observation, action[1:], physics)
    with pytest.raises(ValueError, match=r"physics has shape \(7, 17\), expected \(7, 18\)"):
        reward("cheetah_run", observation, action, physics[:, 1:])
    with pytest.raises(ValueError, match="mode is 'fast'"):
        reward("cheetah_run", observation, action, physics, mode="fast")  # type: ignore
    with pytest.raises(ValueError, match="backend is 'jax'"):
        reward("cheetah_run", observation, action, physics, backend="jax")  # type: ignore
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
    "jaco_reach_top_left": 51.3849,
    "jaco_reach_top_right": 60.5734,
    "jaco_reach_bottom_left": 62.1908,
    "jaco_reach_bottom_right": 58.7465,
    "point_mass_maze_reach_top_left": 2.6026,
    "point_mass_maze_reach_top_right": 3.9982,
    "point_mass_maze_reach_bottom_left": 0.0349,
    "point_mass_maze_reach_bottom_right": 5.4042,
    "quadruped_stand": 500.6078,
    "quadruped_walk": 240.0420,
    "quadruped_run": 246.7509,
    "quadruped_jump": 258.3696,
    "walker_stand": 683.1227,
    "walker_walk": 291.8398,
    "walker_run": 144.4216,
    "walker_flip": 321.4383,
}


def test_formulas_and_their_version_change_together():
    """Cached rewards are found by the version: if these values change, raise it."""
    assert FORMULA_VERSION == 1 and set(GOLDEN) == set(NAMES)
    for name, expected in GOLDEN.items():
        values = reward(name, *random_rows(name, (1000,)))
        assert values.sum(dtype=np.float64) == pytest.approx(expected, abs=1e-3), name
