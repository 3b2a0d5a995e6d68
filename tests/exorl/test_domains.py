"""The closed forms against MuJoCo itself, through dm_control's own environments."""

import numpy as np
import pytest

from exorl import suite
from exorl.domains import DOMAINS, cheetah, jaco, point_mass_maze, quadruped, tolerance, walker
from exorl.tasks import domain_tasks

STATE_TELLS_ALL = [name for name, domain in DOMAINS.items() if hasattr(domain, "observation")]


def closed_form(domain, states):
    return domain.ClosedForm(states, np.zeros(0))


@pytest.mark.parametrize("name", STATE_TELLS_ALL)
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_observations_follow_from_states_far_from_any_episode_too(name, spread):
    task = domain_tasks(name)[0]
    environment, rng = suite.load(task.name, 0), np.random.default_rng(1)
    states = spread * rng.normal(size=(100, task.physics_dim))
    observations = []
    for state in states:
        with environment.physics.reset_context():
            environment.physics.set_state(state)
        observation = environment.task.get_observation(environment.physics)
        observations.append(np.concatenate([np.ravel(part) for part in observation.values()]))
    np.testing.assert_allclose(DOMAINS[name].observation(states), observations, atol=1e-9)


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
    found = closed_form(domain, states).angular_momentum
    np.testing.assert_allclose(found, expected, atol=1e-10)


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
    for bound, margin in ((0.05, 0.05), (0.015, 0.015)):
        below = {"bounds": (-np.inf, bound), "margin": margin}
        np.testing.assert_allclose(
            tolerance.at_most(x / 100, bound, margin), rewards.tolerance(x / 100, **below)
        )
    np.testing.assert_allclose(
        tolerance.near_zero(x, 5), rewards.tolerance(x, margin=5), atol=1e-15
    )
    np.testing.assert_allclose(
        tolerance.near_zero_quadratic(x, 1),
        rewards.tolerance(x, margin=1, value_at_margin=0, sigmoid="quadratic"),
        atol=1e-15,
    )


def test_legs_are_those_of_the_quadruped():
    model = suite.load("quadruped_walk", 0).physics.model
    sides = ("front_left", "front_right", "back_right", "back_left")
    assert model.body_mass[model.name2id("torso", "body")] == pytest.approx(quadruped.TORSO_MASS)
    assert model.body_mass.sum() == pytest.approx(quadruped.TORSO_MASS + 4 * quadruped.LEG.mass)
    for side, hip, heading in zip(sides, quadruped.HIPS, quadruped.HEADINGS, strict=True):
        body = model.name2id(f"hip_{side}", "body")
        np.testing.assert_allclose(model.body_pos[body], [*hip, 0])
        half = heading / 2
        np.testing.assert_allclose(model.body_quat[body], [np.cos(half), 0, 0, np.sin(half)])
        for link in quadruped.LEG.links:
            body = model.name2id(f"{link.name}_{side}", "body")
            np.testing.assert_allclose(model.body_ipos[body][[0, 2]], link.centre, atol=1e-12)
            assert model.body_mass[body] == pytest.approx(link.mass)
            if link.parent is not None:
                np.testing.assert_allclose(model.body_pos[body][[0, 2]], link.joint, atol=1e-12)


def test_the_heights_of_the_quadruped_reach_its_reward():
    """Else the height would have no say in the comparison of jump's rewards."""
    states = np.random.default_rng(0).normal(size=(100, 57))
    heights = closed_form(quadruped, states).com_height
    assert (heights < 1).any() and (heights > 1).any() and np.ptp(heights) > 1


@pytest.mark.parametrize("task", domain_tasks("jaco") + domain_tasks("point_mass_maze"))
def test_targets_are_where_the_environment_shows_them(task):
    environment = suite.load(task.name, 0)
    environment.reset()
    if task.domain == "jaco":
        shown = environment.physics.named.model.site_pos["target_site"]
        np.testing.assert_array_equal(shown, jaco.TARGETS[task.goal])
        assert environment.physics.named.model.site_size["target_site", 0] == jaco.RADIUS
    else:
        shown = environment.physics.named.data.geom_xpos["target"]
        np.testing.assert_array_equal(shown[:2], point_mass_maze.TARGETS[task.goal])
        assert environment.physics.named.model.geom_size["target", 0] == point_mass_maze.RADIUS


def test_the_ball_starts_in_its_corner_and_stays_out_of_the_walls():
    environment = suite.load("point_mass_maze_reach_top_left", 0)
    motions = np.array([[1, 0], [0, -1], [1, 1], [1, -1], [-1, -1]], float)
    inside = []
    for seed in range(20):
        suite.reseed(environment, seed)
        environment.reset()
        x, y = environment.physics.position()
        assert -0.29 <= x <= -0.15 and 0.15 <= y <= 0.29
        for t in range(300):
            environment.step(motions[(seed + t // 60) % 5])
            x, y = np.abs(environment.physics.position())
            # The ball's radius is 0.01: its centre may come this near to the cross, a bit of give.
            inside.append((x < 0.185 and y < 0.025) or (x < 0.025 and y < 0.185))
    assert not any(inside)
