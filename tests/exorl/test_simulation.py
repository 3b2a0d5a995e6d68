import numpy as np
import pytest

from exorl.domains import DOMAINS
from exorl.environments import make
from exorl.simulation import Simulation, SimulationError, one_step
from exorl.tasks import TASKS, domain_tasks

NAMES = tuple(TASKS)


@pytest.mark.parametrize("name", NAMES)
def test_it_equals_the_environment(name):
    seeds, rng = (11, 3), np.random.default_rng(0)
    simulation, environments = Simulation(name, 2), [make(name) for _ in seeds]
    step = simulation.reset(seeds)
    for i, seed in enumerate(seeds):
        observation, info = environments[i].reset(seed=seed)
        np.testing.assert_array_equal(step.physics[i], info["physics"])
        np.testing.assert_allclose(step.observation[i], observation, rtol=1e-6, atol=1e-7)
    assert step.reward.dtype == np.float32 and not step.reward.any()
    for _ in range(120):
        action = rng.uniform(-1.5, 1.5, (2, TASKS[name].action_dim)).astype(np.float32)
        step = simulation.step(action)
        for i, environment in enumerate(environments):
            observation, reward, _, _, info = environment.step(action[i])
            # The same physics to the bit; what is read from it in closed form to float32.
            np.testing.assert_array_equal(step.physics[i], info["physics"])
            np.testing.assert_allclose(step.observation[i], observation, rtol=1e-6, atol=1e-6)
            assert step.reward[i] == pytest.approx(reward, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_an_episode_depends_on_its_seed_alone(name):
    """Not on its place, its neighbours, or what was simulated before."""
    rng = np.random.default_rng(1)
    actions = rng.uniform(-1, 1, (40, 1, TASKS[name].action_dim)).astype(np.float32)
    alone, among = Simulation(name, 1), Simulation(name, 3)
    among.reset((0, 1, 2))
    among.step(np.ones((3, TASKS[name].action_dim), np.float32))
    one, three = alone.reset((7,)), among.reset((4, 5, 7))
    np.testing.assert_array_equal(one.physics[0], three.physics[2])
    for action in actions:
        one, three = alone.step(action), among.step(action.repeat(3, axis=0))
    for field, batch in zip(one, three, strict=True):
        np.testing.assert_array_equal(field[0], batch[2])


@pytest.mark.parametrize("domain", DOMAINS)
def test_one_step_leads_from_recorded_states_to_the_next(domain):
    task, rng = domain_tasks(domain)[0], np.random.default_rng(2)
    simulation = Simulation(task.name, 1)
    states = [simulation.reset((3,)).physics[0]]
    actions = rng.uniform(-1, 1, (60, task.action_dim)).astype(np.float32)
    for action in actions:
        states.append(simulation.step(action[None]).physics[0])
    before, after = np.array(states[:-1]), np.array(states[1:])
    np.testing.assert_allclose(one_step(task.name, before, actions), after, rtol=0, atol=1e-4)
    others = one_step(task.name, before, actions[::-1])
    assert np.abs(others - after).max() > 1e-2


def test_steps_are_fresh_arrays():
    simulation = Simulation("cheetah_run", 2)
    first = simulation.reset((0, 1))
    kept = [array.copy() for array in first]
    second = simulation.step(np.ones((2, 6), np.float32))
    for before, copy, after in zip(first, kept, second, strict=True):
        np.testing.assert_array_equal(before, copy)
        assert not np.shares_memory(before, after)
    assert [array.dtype for array in second] == [np.float32, np.float32, np.float64]
    assert [array.shape for array in second] == [(2, 17), (2,), (2, 18)]


def test_wrong_calls_are_refused():
    simulation = Simulation("cheetah_run", 2)
    with pytest.raises(ValueError, match="expected 2 seeds, one an episode, got 1"):
        simulation.reset((0,))
    simulation.reset((0, 1))
    with pytest.raises(ValueError, match=r"shape \(6,\), expected \(2, 6\)"):
        simulation.step(np.zeros(6, np.float32))
    with pytest.raises(ValueError, match="finite"):
        simulation.step(np.full((2, 6), np.nan, np.float32))


def test_a_diverged_state_is_named_and_not_restarted_unseen():
    simulation = Simulation("cheetah_run", 3)
    simulation.reset((0, 1, 2))
    simulation._data[1].qvel[:] = np.nan
    with pytest.raises(
        SimulationError, match=r"cheetah_run: the states of episodes \[1\] diverged"
    ):
        simulation.step(np.zeros((3, 6), np.float32))
