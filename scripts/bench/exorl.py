"""What the benchmark's own work costs: relabelling, reading, packing and stepping environments.

Each row's ways take turns in one process, and medians are reported. The episodes are collected
for it by random policies. Ratios are what to compare across machines.
"""

import argparse
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import exorl
from exorl import suite
from exorl.collect import CollectConfig, collect
from exorl.domains import DOMAINS
from exorl.episodes import FIELDS, find
from exorl.tasks import Task
from scripts.bench.turns import medians

# One a domain: the paper's task where it has one.
TASKS = (
    "walker_run",
    "cheetah_run",
    "cartpole_swingup",
    "jaco_reach_top_left",
    "quadruped_run",
    "quadruped_jump",
    "point_mass_maze_reach_top_left",
)


def main(options: Sequence[str]) -> None:
    """Prints four tables."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench exorl",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="example: python -m scripts.bench exorl --repeats 3 --states 500 --episodes 20",
    )
    parser.add_argument("--repeats", type=int, default=7, help="turns of which the median is taken")
    parser.add_argument("--states", type=int, default=2000, help="states that dm_control relabels")
    parser.add_argument("--episodes", type=int, default=200, help="episodes to read and to pack")
    arguments = parser.parse_args(options)
    relabelling(arguments.states, arguments.repeats)
    with tempfile.TemporaryDirectory() as folder:
        episodes(Path(folder), arguments.episodes, arguments.repeats)
    stepping(arguments.repeats)


def relabelling(states: int, repeats: int) -> None:
    """Thousands of states a second, and how many times as fast as dm_control's own way."""
    print("Relabelling, thousand states/s (and times dm_control)")
    print(f"{'task':32}{'dm_control':>11}{'mujoco':>17}{'closed form':>19}")
    for task in (exorl.task(name) for name in TASKS):
        rows = random_rows(task, states)
        # Enough states for the closed form to take some time.
        many = [np.concatenate([array] * 50) for array in rows]
        relabel = functools.partial(exorl.reward, task.name)
        calls = {
            "dm_control": functools.partial(relabel, *rows, backend="dm_control"),
            "mujoco": functools.partial(relabel, *rows, backend="mujoco"),
            "closed_form": functools.partial(relabel, *many),
        }
        seconds = {name: taken.wall for name, taken in medians(calls, repeats).items()}
        seconds["closed_form"] /= 50
        speed = {name: states / taken / 1000 for name, taken in seconds.items()}
        cells = (
            f"{speed[name]:>10.0f} ({speed[name] / speed['dm_control']:4.0f} ×)"
            for name in ("mujoco", "closed_form")
        )
        print(f"{task.name:32}{speed['dm_control']:>11.1f}" + " ".join(cells))


def random_rows(task: Task, count: int) -> list[np.ndarray]:
    """Observations, actions and states of a random policy, `[count, …]` each."""
    simulation, rng = exorl.Simulation(task.name, 10), np.random.default_rng(0)
    simulation.reset(range(10))
    rows = []
    for _ in range(-(-count // 10)):
        action = rng.uniform(-1, 1, (10, task.action_dim)).astype(np.float32)
        step = simulation.step(action)
        rows.append((step.observation, action, step.physics))
    return [np.concatenate(column)[:count] for column in zip(*rows, strict=True)]


def episodes(folder: Path, count: int, repeats: int) -> None:
    """Reads episodes in random order, from files and from a store, and packs them."""
    config = CollectConfig("walker_walk", "random", folder / "episodes", steps=1000 * count)
    files = [file.path for file in find(collect(config))]
    store = exorl.pack([config.folder], folder / "store", domain="walker")
    order = np.random.default_rng(0).permutation(len(files))
    packings = iter(range(repeats + 1))

    def decode(numbers: Sequence[int] | np.ndarray) -> None:
        for i in numbers:
            with np.load(str(files[i])) as arrays:
                _ = [arrays[name] for name in arrays]

    def read() -> None:
        for i in order:
            episode = store[i]
            _ = [getattr(episode, name).copy() for name in FIELDS]

    def pack() -> None:
        exorl.pack([config.folder], folder / f"again{next(packings)}", domain="walker")

    seconds = medians({"npz": lambda: decode(order), "store": read, "pack": pack}, repeats)
    speed = {name: len(files) / taken.wall for name, taken in seconds.items()}
    ratio = {name: value / speed["npz"] for name, value in speed.items()}
    print("\nEpisodes of 1,000 walker steps, a second (and times np.load on one core)")
    print(f"{'np.load of the five arrays':36}{speed['npz']:9.0f}")
    print(f"{'read from a store, copied':36}{speed['store']:9.0f} ({ratio['store']:.0f} ×)")
    print(f"{'packed':36}{speed['pack']:9.0f} ({ratio['pack']:.2f} ×)")


def stepping(repeats: int) -> None:
    """Steps a second of dm_control's environment, of ours around it, and of episodes side by side.

    All begin episodes equally often, and take the same actions.
    """
    print("\nSteps a second, one core (and times the bare suite)")
    print(f"{'domain':18}{'bare suite':>11}{'exorl.make':>17}{'Simulation of 20':>21}")
    for domain in DOMAINS:
        task = next(exorl.task(name) for name in TASKS if exorl.task(name).domain == domain)
        speed = _steps_a_second(task, repeats)
        cells = (
            f"{speed[name]:>10.0f} ({speed[name] / speed['bare']:4.2f} ×)"
            for name in ("make", "simulation")
        )
        print(f"{domain:18}{speed['bare']:>11.0f}" + "  ".join(cells))


def _steps_a_second(task: Task, repeats: int) -> dict[str, float]:
    bare, ours, size = suite.load(task.name, 0), exorl.make(task.name), 20
    simulation, steps = exorl.Simulation(task.name, size), task.episode_length // 5
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (steps, task.action_dim)).astype(np.float32)
    bare.reset()
    motors = bare.action_spec()
    controls = suite.scaling(motors.minimum, motors.maximum)(actions)

    def play_bare() -> None:
        suite.reseed(bare, 0)
        bare.reset()
        for control in controls:
            bare.step(control)

    def play_ours() -> None:
        ours.reset(seed=0)
        for action in actions:
            ours.step(action)

    def play_together() -> None:
        simulation.reset([0] * size)
        for action in actions:
            simulation.step(np.broadcast_to(action, (size, task.action_dim)))

    calls = {"bare": play_bare, "make": play_ours, "simulation": play_together}
    taken = medians(calls, repeats)
    counts = {"bare": steps, "make": steps, "simulation": size * steps}
    return {name: counts[name] / taken[name].wall for name in calls}
