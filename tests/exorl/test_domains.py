"""The closed forms against MuJoCo itself, through dm_control's own environments."""

import numpy as np
import pytest

from exorl import suite
from exorl.domains import cheetah, tolerance, walker
from exorl.rewards import DOMAINS, reward
from exorl.tasks import TASKS

NAMES = tuple(TASKS)


def live_steps(name, count, seed=0):
    """Observations, actions, states and rewards of `count` random steps in dm_control."""
    environment, rng = suite.load(name, seed), np.random.default_rng(seed)
    environment.reset()
    rows = []
    for _ in range(count):
        action = rng.uniform(-1, 1, TASKS[name].action_dim).astype(np.float32)
        step = environment.step(action)
        if step.first():
            continue
        observation = np.concatenate([np.ravel(part) for part in step.observation.values()])
        rows.append((observation, action, environment.physics.get_state(), step.reward))
    return [np.array(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_rewards_and_observations_are_those_of_dm_control(name):
    observation, action, physics, expected = live_steps(name, 1000)
    domain, goal = DOMAINS[TASKS[name].domain], TASKS[name].goal
    np.testing.assert_allclose(domain.observation(physics), observation, rtol=0, atol=1e-9)
    exact = domain.reward(goal, physics, action.astype(np.float64))
    np.testing.assert_allclose(exact, expected, rtol=0, atol=1e-10)
    single = reward(name, observation, action, physics)
    np.testing.assert_allclose(single, expected, rtol=0, atol=1e-7)
    # The comparison has something to compare, but for the pole that nobody swings up.
    assert np.ptp(expected) > 0.005 or name == "cartpole_swingup_sparse"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_closed_forms_hold_for_states_far_from_any_episode(name, spread):
    """Arbitrary angles and velocities reach every branch of the formulas."""
    environment, task, rng = suite.load(name, 0), TASKS[name], np.random.default_rng(1)
    states = spread * rng.normal(size=(200, task.physics_dim))
    if name.endswith("_sparse"):
        states[::2] /= 10 * spread  # within what is asked for
    controls = rng.uniform(-1, 1, (200, task.action_dim))
    rewards, observations = [], []
    for state, control in zip(states, controls, strict=True):
        with environment.physics.reset_context():
            environment.physics.set_state(state)
        environment.physics.set_control(control)
        rewards.append(environment.task.get_reward(environment.physics))
        observation = environment.task.get_observation(environment.physics)
        observations.append(np.concatenate([np.ravel(part) for part in observation.values()]))
    domain = DOMAINS[task.domain]
    np.testing.assert_allclose(domain.reward(task.goal, states, controls), rewards, atol=1e-10)
    np.testing.assert_allclose(domain.observation(states), observations, atol=1e-9)


@pytest.mark.parametrize(("name", "domain"), [("cheetah_run", cheetah), ("walker_walk", walker)])
def test_links_are_those_of_the_model(name, domain):
    import mujoco

    model = suite.load(name, 0).physics.model
    ids = {link.name: model.name2id(link.name, "body") for link in domain.BODY.links}
    assert sum(link.mass for link in domain.BODY.links) == pytest.approx(model.body_mass.sum())

    def anchor(body):
        return model.jnt_pos[model.body_jntadr[body] + model.body_jntnum[body] - 1]

    for link in domain.BODY.links:
        body = ids[link.name]
        frame = np.zeros(9)
        mujoco.mju_quat2Mat(frame, model.body_iquat[body])
        inertia = frame.reshape(3, 3)[1] ** 2 @ model.body_inertia[body]
        centre = (model.body_ipos[body] - anchor(body))[[0, 2]]
        np.testing.assert_allclose(link.centre, centre, atol=1e-12)
        np.testing.assert_allclose((link.mass, link.inertia), (model.body_mass[body], inertia))
        if link.parent is not None:
            above = ids[link.parent]
            assert model.body_parentid[body] == above
            joint = (model.body_pos[body] + anchor(body) - anchor(above))[[0, 2]]
            np.testing.assert_allclose(link.joint, joint, atol=1e-12)


@pytest.mark.parametrize(("name", "domain"), [("cheetah_flip", cheetah), ("walker_flip", walker)])
def test_angular_momentum_is_mujocos(name, domain):
    physics = suite.load(name, 0).physics
    states = 3 * np.random.default_rng(0).normal(size=(100, 18))
    expected = []
    for state in states:
        with physics.reset_context():
            physics.set_state(state)
        expected.append(physics.named.data.subtree_angmom["torso", 1])
    np.testing.assert_allclose(domain.angular_momentum(states), expected, atol=1e-10)


def test_walker_height_is_the_models():
    model = suite.load("walker_walk", 0).physics.model
    assert model.body_pos[model.name2id("torso", "body"), 2] == walker.INITIAL_HEIGHT


def test_tolerances_are_those_of_dm_control():
    from dm_control.utils import rewards

    x = np.linspace(-30, 30, 601)
    for bound, margin in ((1.2, 0.6), (10, 10), (8, 4)):
        above = {"bounds": (bound, np.inf), "margin": margin}
        np.testing.assert_allclose(
            tolerance.at_least(x, bound, margin), rewards.tolerance(x, **above), atol=1e-15
        )
        for value in (0, 0.5):
            expected = rewards.tolerance(x, **above, value_at_margin=value, sigmoid="linear")
            actual = tolerance.at_least_linear(x, bound, margin, value)
            np.testing.assert_allclose(actual, expected, atol=1e-15)
    np.testing.assert_allclose(
        tolerance.near_zero(x, 5), rewards.tolerance(x, margin=5), atol=1e-15
    )
    np.testing.assert_allclose(
        tolerance.near_zero_quadratic(x, 1),
        rewards.tolerance(x, margin=1, value_at_margin=0, sigmoid="quadratic"),
        atol=1e-15,
    )
