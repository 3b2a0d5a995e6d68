from pathlib import Path

import numpy as np
import pytest

from exorl import suite, tasks
from exorl.domains import DOMAINS
from exorl.tasks import HIDDEN_GROUPS, TASKS, TaskError

NAMES = tuple(TASKS)


@pytest.mark.parametrize("domain", DOMAINS)
def test_sizes_and_lengths_are_those_of_dm_control(domain):
    name = tasks.domain_tasks(domain)[0].name
    task, environment = TASKS[name], suite.load(name, seed=0)
    observation = environment.reset().observation
    assert sum(np.size(part) for part in observation.values()) == task.observation_dim
    assert environment.action_spec().shape == (task.action_dim,)
    assert environment.physics.get_state().shape == (task.physics_dim,)
    motors = environment.action_spec()
    steps = 0
    while not environment.step(motors.minimum).last():
        steps += 1
    assert steps + 1 == task.episode_length


@pytest.mark.parametrize("name", NAMES)
def test_names_have_a_domain_and_a_goal(name):
    task = tasks.task(name)
    assert name == f"{task.domain}_{task.goal}"
    assert task.domain in DOMAINS
    assert task in tasks.domain_tasks(task.domain)
    assert 0 <= task.random_return < task.reference_return <= task.episode_length


def test_tasks_of_a_domain_share_their_sizes():
    for domain in DOMAINS:
        sizes = {
            (t.observation_dim, t.action_dim, t.physics_dim) for t in tasks.domain_tasks(domain)
        }
        assert len(sizes) == 1


@pytest.mark.parametrize("typo", ["cheetah_rnu", "cheetah-run", "run"])
def test_unknown_task_names_the_closest_and_all(typo):
    with pytest.raises(TaskError, match=r"did you mean '.*_run'") as error:
        tasks.task(typo)
    assert all(name in str(error.value) for name in TASKS)


def test_unknown_domain_is_refused():
    with pytest.raises(TaskError, match="unknown domain 'cheeta': did you mean 'cheetah'"):
        tasks.domain_tasks("cheeta")


def test_every_task_of_the_benchmark_is_there():
    goals = {domain: [task.goal for task in tasks.domain_tasks(domain)] for domain in DOMAINS}
    corners = [f"reach_{side}" for side in ("top_left", "top_right", "bottom_left", "bottom_right")]
    there_and_back = ["run", "run_backward", "walk", "walk_backward", "flip", "flip_backward"]
    assert goals == {
        "cartpole": ["balance", "balance_sparse", "swingup", "swingup_sparse"],
        "cheetah": there_and_back,
        "jaco": corners,
        "point_mass_maze": corners,
        "quadruped": ["stand", "walk", "run", "jump"],
        "walker": ["stand", "walk", "run", "flip"],
    }


def test_the_guide_shows_the_same_table():
    guide = (Path(__file__).parents[2] / "docs/exorl.md").read_text()
    shown = [line.split(" | ") for line in guide.splitlines() if line.startswith("| ")]
    rows = {cells[0].strip("| "): cells[1:] for cells in shown if cells[0].strip("| ") in TASKS}
    assert list(rows) == list(TASKS)
    for name, task in TASKS.items():
        random = f"{task.random_return:.1f} ± {task.random_error:.1f} |"
        sizes = task.episode_length, task.observation_dim, task.action_dim, task.physics_dim
        assert rows[name] == [*map(str, sizes), f"{task.reference_return:.0f}", random]


def test_hidden_groups_hold_tasks_of_one_domain():
    for group in HIDDEN_GROUPS.values():
        assert len(group) > 1
        assert len({tasks.task(name).domain for name in group}) == 1


def test_normalized_puts_random_at_0_and_the_reference_at_100():
    task = tasks.task("walker_walk")
    scores = tasks.normalized("walker_walk", [[task.random_return], [task.reference_return]])
    np.testing.assert_allclose(scores, [[0], [100]], atol=1e-12)
