import dataclasses
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from exorl import Simulation, episodes, pack
from exorl.episodes import FIELDS, Episode, EpisodeError
from exorl.rewards import reward
from exorl.store import EpisodeStore
from exorl.tasks import TaskError, domain_tasks, task
from exorl.verify import VerifyError, verify
from exorl.verify.recomputed import check_observations
from exorl.verify.report import Findings
from exorl.verify.source import open_source
from scripts.verify import Verify, main

ROOT = Path(__file__).parent.parent.parent
REAL = os.environ.get("EXORING_REAL_EPISODES")


@pytest.fixture
def gaits(cheetah_episodes, tmp_path):
    """Five sound cheetah episodes of 40 steps, free to be broken."""
    for file in episodes.find(cheetah_episodes)[:5]:
        episode = episodes.read(file.path)
        start = Episode(**{name: getattr(episode, name)[:41] for name in FIELDS})
        episodes.write(tmp_path / "gaits", file.index, start)
    return tmp_path / "gaits"


def path(folder, number):
    return folder / f"episode_{number:06d}_40.npz"


def fields(folder, number):
    with np.load(path(folder, number)) as arrays:
        return {name: arrays[name] for name in FIELDS}


def change(folder, number, **changed):
    """Replaces fields of an episode without the writer's checks."""
    np.savez_compressed(path(folder, number), **(fields(folder, number) | changed))


def by_status(report, status):
    return {check.name for check in report.checks if check.status == status}


def found(report, name):
    (check,) = [check for check in report.checks if check.name == name]
    return check


def matching(report):
    return [match.task for match in report.tasks if match.matches]


def poked(array, row, value):
    array = array.copy()
    array[row, 0] = value
    return array


def early(array):
    """Row t holds what belongs into row t + 1."""
    return np.concatenate([array[1:], array[-1:]])


def late(array):
    return np.concatenate([array[:1], array[:-1]])


def as_source(kind, folder, tmp_path):
    if kind == "store":
        return pack([folder], tmp_path / "store", domain="cheetah").path
    if kind == "zip":
        with zipfile.ZipFile(tmp_path / "gaits.zip", "w") as archive:
            for file in folder.iterdir():
                archive.write(file, f"buffer/{file.name}")
        return tmp_path / "gaits.zip"
    return folder


@pytest.mark.parametrize("kind", ["folder", "zip", "store"])
def test_sound_data_pass_and_name_their_task(gaits, tmp_path, kind):
    report = verify(as_source(kind, gaits, tmp_path))
    assert report.status == "ok", report
    assert report.domain == "cheetah" and report.inferred == (kind != "store")
    assert report.episodes == report.sampled == 5
    assert matching(report) == ["cheetah_run"]
    (run, backward, *_) = report.tasks
    assert run.max_error < 1e-6 and run.episodes == 5 and backward.mean_error > 1e-3
    assert found(report, "recorded reward").detail == "cheetah_run in 5 of 5 episodes"
    (collector,) = report.collectors
    assert (collector.name, collector.episodes, collector.steps) == ("gaits", 5, 5 * 40)
    assert 0 < found(report, "one-step physics").measured < 1e-6
    assert ("digests" in {check.name for check in report.checks}) == (kind == "store")


# What is done to an episode, which checks must fail (and no others), and what they say.
BREAKS = {
    "action out of range": (
        lambda e: {"action": poked(e["action"], 5, -1.5)},
        {"action range": ": 1.5 in row 5"},
    ),
    "actions beside the states they were taken in": (
        lambda e: {"action": early(e["action"])},
        {"row 0": "", "one-step physics": "", "action rows": ": one row early"},
    ),
    "actions late": (
        lambda e: {"action": late(e["action"])},
        {"one-step physics": "", "action rows": ": one row late"},
    ),
    "rewards beside the states they were earned in": (
        lambda e: {"reward": early(e["reward"])},
        {"row 0": "", "reward rows": ": one row early"},
    ),
    "rewards late": (
        lambda e: {"reward": late(e["reward"])},
        {"reward rows": ": one row late"},
    ),
    "one reward": (
        lambda e: {"reward": poked(e["reward"], 9, 0.987)},
        {"recorded reward": ""},
    ),
    "reward of the start": (
        lambda e: {"reward": poked(e["reward"], 0, 0.5)},
        {"row 0": ""},
    ),
    "discount of the end": (
        lambda e: {"discount": poked(e["discount"], -1, 0)},
        {"discounts": ": 0 in row 40"},
    ),
    "observation permuted": (
        lambda e: {"observation": e["observation"][:, ::-1]},
        {"observations": ": entry "},
    ),
    "states late": (
        lambda e: {"physics": late(e["physics"])},
        {
            "observations": ": entry ",
            "one-step physics": "",
            "action rows": ": one row early",
            "reward rows": ": one row early",
        },
    ),
    "one state of another time": (
        lambda e: {"physics": np.insert(np.delete(e["physics"], 2, 0), 2, e["physics"][30], 0)},
        {"observations": " in row 2", "recorded reward": ""},
    ),
    "absurd states": (
        lambda e: {"physics": np.full_like(e["physics"], 1e300)},
        {"observations": "", "one-step physics": "", "recorded reward": ""},
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_each_fault_fails_its_check_and_names_the_episode(gaits, name):
    damage, expected = BREAKS[name]
    change(gaits, 0, **damage(fields(gaits, 0)))
    report = verify(gaits)
    assert report.status == "failed"
    assert by_status(report, "failed") == set(expected), report.checks
    for check, text in expected.items():
        (example,) = found(report, check).examples
        assert "gaits/episode_000000_40.npz" in example and text in example
    json.loads(report.to_json())


def unreadable(folder):
    """Three episodes that the reader refuses, each for another reason."""
    change(folder, 0, observation=poked(fields(folder, 0)["observation"], 7, np.nan))
    change(folder, 1, physics=fields(folder, 1)["physics"].astype(np.float32))
    path(folder, 3).write_bytes(path(folder, 3).read_bytes()[:-100])


def test_unreadable_episodes_are_named_and_the_others_checked(gaits):
    unreadable(gaits)
    change(gaits, 4, discount=poked(fields(gaits, 4)["discount"], -1, 0))
    report = verify(gaits)
    assert by_status(report, "failed") == {"schema", "discounts"}
    schema = found(report, "schema")
    assert schema.measured == 3
    for example, text in zip(
        schema.examples,
        (
            "episode_000000_40.npz: observation is not finite in row 7",
            "episode_000001_40.npz: physics is float32, expected float64",
            "episode_000003_40.npz: damaged",
        ),
        strict=True,
    ):
        assert text in example
    assert report.sampled == 2 and matching(report) == ["cheetah_run"]
    assert report.collectors[0].episodes == 2


def test_data_without_a_readable_episode_fail_without_a_domain(gaits):
    for file in gaits.iterdir():
        file.write_bytes(b"nonsense")
    report = verify(gaits)
    assert report.status == "failed" and report.domain is None and not report.inferred
    assert found(report, "schema").examples[-1] == "and 2 more"
    assert report.tasks == () and report.sampled == 0
    assert main(Verify(gaits)) == 1


def test_what_may_be_meant_is_only_warned_of(gaits):
    shutil.copy(path(gaits, 0), path(gaits, 9))
    path(gaits, 3).rename(gaits / "episode_4_40.npz")
    report = verify(gaits)
    assert report.status == "warning" and by_status(report, "warning") == {"duplicates", "numbers"}
    (twins,) = found(report, "duplicates").examples
    assert twins == "gaits/episode_000009_40.npz repeats gaits/episode_000000_40.npz"
    numbers = found(report, "numbers")
    assert numbers.examples == ("gaits: 5 of 0 to 9 missing, 1 double",)
    assert numbers.measured == 6 and report.collectors[0].missing == 5


def test_intrinsic_rewards_are_of_no_task(gaits):
    rng = np.random.default_rng(0)
    for number in range(5):
        rewards = rng.uniform(0, 1, (41, 1)).astype(np.float32)
        change(gaits, number, reward=poked(rewards, 0, 0))
    report = verify(gaits)
    assert report.status == "warning" and by_status(report, "warning") == {"recorded reward"}
    assert found(report, "recorded reward").detail == "no task in 5 of 5 episodes"
    assert matching(report) == []


def test_another_collector_may_record_another_reward(gaits, tmp_path):
    shutil.copytree(gaits, tmp_path / "other")
    shutil.copytree(gaits, tmp_path / "rnd")
    for number in range(5):
        episode = fields(gaits, number)
        states = episode["observation"], episode["action"], episode["physics"]
        backward = reward("cheetah_run_backward", *states)[:, None]
        change(tmp_path / "other", number, reward=poked(backward, 0, 0))
        change(tmp_path / "rnd", number, reward=poked(backward + 1, 0, 0))
    sources = [gaits, tmp_path / "other", tmp_path / "rnd"]
    report = verify(pack(sources, tmp_path / "store", domain="cheetah").path)
    # What differs is the reward alone.
    assert by_status(report, "warning") == {"recorded reward", "duplicates"}
    assert report.status == "warning" and found(report, "duplicates").measured == 10
    named = ("cheetah_run", "cheetah_run_backward", "no task")
    detail = "; ".join(f"{each} in 5 of 15 episodes" for each in named)
    assert found(report, "recorded reward").detail == detail
    assert found(report, "recorded reward").examples[0] == "rnd/episode_000000_40.npz"
    assert [each.name for each in report.collectors] == ["gaits", "other", "rnd"]


def record(folder, task, action, mode="exact"):
    """An episode of actions `[T, A]`, its rewards computed in the given mode."""
    simulation = Simulation(task, 1)
    steps = [simulation.reset([0]), *(simulation.step(each[None]) for each in action)]
    observation = np.concatenate([step.observation for step in steps])
    physics = np.concatenate([step.physics for step in steps])
    action = np.concatenate([np.zeros_like(action[:1]), action]).astype(np.float32)
    rewards = reward(task, observation, action, physics, mode=mode)[:, None]
    ones = np.ones_like(rewards)
    episodes.write(folder, 0, Episode(observation, action, poked(rewards, 0, 0), ones, physics))
    return folder


def random_actions(dim):
    return np.random.default_rng(0).uniform(-1, 1, (50, dim)).astype(np.float32)


def test_tasks_that_differ_in_their_start_alone_match_alike(tmp_path):
    report = verify(record(tmp_path, "cartpole_swingup", random_actions(1)))
    assert report.status == "ok" and report.domain == "cartpole"
    assert matching(report) == ["cartpole_balance", "cartpole_swingup"]


def test_rewards_that_forget_the_cost_of_control_are_recognised(tmp_path):
    report = verify(record(tmp_path, "cartpole_swingup", random_actions(1), "exorl"))
    assert report.status == "warning" and matching(report) == []
    detail = "cartpole_balance and cartpole_swingup without the cost of control in 1 of 1 episodes"
    assert report.checks[-1].detail == detail


@pytest.mark.parametrize("length", [1, 2, 50])
def test_constant_actions_are_not_taken_for_shifted(tmp_path, length):
    action = np.full((length, 1), 0.5, np.float32)
    assert verify(record(tmp_path, "cartpole_swingup", action)).status == "ok"


@pytest.mark.parametrize(
    ("name", "felt", "told"),
    [
        ("quadruped_run", (44, 48, 77), (0, 15, 16, 43, 47)),
        ("jaco_reach_top_left", (12, 17, 33), (0, 11, 18, 26, 29, 30, 31, 32)),
    ],
)
def test_of_observations_by_sensors_the_states_part_is_recomputed(tmp_path, name, felt, told):
    spec = task(name)
    report = verify(record(tmp_path, name, random_actions(spec.action_dim)))
    assert report.status == "ok" and name in matching(report)
    assert 0 < found(report, "observations").measured < 1e-6
    [member] = open_source(tmp_path, None).members
    episode = member.read(spec)
    for entry in (*felt, *told):
        observation, findings = episode.observation.copy(), Findings()
        observation[7, entry] += 0.01
        changed = dataclasses.replace(episode, observation=observation)
        check_observations(member, changed, spec, findings)
        [check] = findings.checks()
        assert check.status == ("failed" if entry in told else "ok")
        assert entry in felt or f"entry {entry} in row 7" in check.examples[0]


def test_states_that_diverge_fail_alone(tmp_path):
    record(tmp_path, "walker_run", random_actions(6))
    episode = episodes.read(tmp_path / "episode_000000_50.npz")
    fast = np.where(np.arange(18) < 9, episode.physics, 9e9)
    episodes.write(tmp_path, 1, dataclasses.replace(episode, physics=fast))
    report = verify(tmp_path)
    physics = found(report, "one-step physics")
    assert physics.status == "failed" and physics.measured > 1e300
    assert physics.examples == (f"{tmp_path.name}/episode_000001_50.npz",)
    assert found(report, "action rows").status == "ok"
    json.loads(report.to_json())


def test_only_a_sample_is_recomputed(gaits):
    change(gaits, 1, reward=late(fields(gaits, 1)["reward"]))
    change(gaits, 4, discount=poked(fields(gaits, 4)["discount"], -1, 0))
    report = verify(gaits, "cheetah", episodes=2)  # numbers 0 and 2
    assert report.sampled == 2 and report.episodes == 5 and not report.inferred
    assert by_status(report, "failed") == {"discounts"}
    assert report.tasks[0].episodes == 2 and report.tasks[0].matches
    assert verify(gaits, episodes=100).sampled == 5


def test_a_store_changed_by_hand_is_noticed(gaits, tmp_path):
    store = pack([gaits], tmp_path / "store", domain="cheetah")
    actions = np.load(store.path / "action.npy", mmap_mode="r+")
    actions[store.offsets[3] + 5] = 0
    actions.flush()
    report = verify(store.path)
    assert by_status(report, "failed") == {"digests"}
    assert found(report, "digests").examples == ("gaits/episode_000003_40.npz",)


def test_what_packing_left_out_is_known(gaits, tmp_path):
    unreadable(gaits)
    store = pack([gaits], tmp_path / "store", domain="cheetah", skip_bad=True)
    report = verify(store.path)
    assert by_status(report, "warning") == {"numbers", "skipped"}
    assert len(found(report, "skipped").examples) == 3
    chosen = pack(
        [gaits], tmp_path / "two", domain="cheetah", episodes=3, select="last", skip_bad=True
    )
    assert EpisodeStore(chosen.path).index["skipped"]
    assert by_status(verify(chosen.path), "warning") == {"skipped"}


def test_what_can_not_be_checked_is_refused(gaits, tmp_path):
    with pytest.raises(TaskError, match="unknown domain 'walkr'"):
        verify(gaits, "walkr")
    with pytest.raises(VerifyError, match="0 episodes to sample"):
        verify(gaits, episodes=0)
    with pytest.raises(EpisodeError, match="no such folder"):
        verify(tmp_path / "none")
    store = pack([gaits], tmp_path / "store", domain="cheetah")
    with pytest.raises(VerifyError, match="holds cheetah episodes, not walker"):
        verify(store.path, "walker")
    change(gaits, 0, action=np.zeros((41, 5), np.float32))
    with pytest.raises(VerifyError, match=r"observation 17, action 5, physics 18\) of no domain"):
        verify(gaits)
    assert by_status(verify(gaits, "cheetah"), "failed") == {"schema"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(VerifyError, match="empty: no episodes"):
        verify(tmp_path / "empty")


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "scripts.verify", *(str(each) for each in arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_the_command_tells_by_its_exit_status(gaits, tmp_path):
    sound = run(gaits, "--json")
    assert sound.returncode == 0, sound.stderr
    report = json.loads(sound.stdout)
    assert report["status"] == "ok" and report["domain"] == "cheetah"
    change(gaits, 2, action=late(fields(gaits, 2)["action"]))
    failed = run(gaits)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "gaits/episode_000002_40.npz: one row late" in failed.stdout
    assert failed.stdout.splitlines()[-1] == "failed"
    unusable = run(tmp_path / "none")
    assert unusable.returncode == 2 and unusable.stderr.startswith("exoring: error:")


def test_help_explains_itself_with_an_example():
    done = run("--help")
    assert done.returncode == 0
    assert "Example" in done.stdout and "python -m scripts.verify" in done.stdout


def test_the_report_is_for_people(gaits, capsys):
    path(gaits, 3).unlink()
    assert main(Verify(gaits, episodes=2)) == 0
    printed = capsys.readouterr().out
    assert "4 episodes of cheetah (by the episodes' sizes)" in printed
    assert "looked at in 2 of them" in printed
    assert "gaits: 1 of 0 to 4 missing" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("cheetah_run ")]
    assert line.endswith("all 2")


@pytest.mark.real
@pytest.mark.skipif(REAL is None, reason="EXORING_REAL_EPISODES is not set")
def test_real_episodes_are_sound_and_of_walker_walk():
    report = verify(REAL or "")
    assert by_status(report, "failed") == set()
    assert report.domain == "walker" and matching(report) == ["walker_walk"]
    assert [match.episodes for match in report.tasks if not match.matches] == [0, 0, 0]
    assert found(report, "one-step physics").measured < 1e-6


def test_the_mazes_four_rewards_are_compared_with_four_tasks(tmp_path):
    names = [task.name for task in domain_tasks("point_mass_maze")]
    simulation, rng = Simulation(names[0], 1), np.random.default_rng(0)
    simulation.place(np.array([[-0.15, 0.15, 0, 0]]))  # at the first goal
    actions = [np.zeros((1, 2), np.float32)]
    steps = [simulation.step(actions[0])]
    for _ in range(40):
        actions.append(rng.uniform(-1, 1, (1, 2)).astype(np.float32))
        steps.append(simulation.step(actions[-1]))
    states = {
        "observation": np.concatenate([step.observation for step in steps]),
        "action": np.concatenate(actions),
        "physics": np.concatenate([step.physics for step in steps]),
    }
    paid = np.stack([reward(name, **states) for name in names], axis=1)
    paid[0] = 0
    discount = np.ones((41, 1), np.float32)
    folder = tmp_path / "maze"
    episodes.write(folder, 0, Episode(reward=paid, discount=discount, **states))
    report = verify(folder)
    assert report.status == "ok" and matching(report) == names
    episodes.write(folder, 0, Episode(reward=early(paid), discount=discount, **states))
    assert "reward rows" in by_status(verify(folder), "failed")
