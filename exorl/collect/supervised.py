"""Collects the whole replay of a DDPG agent that learns the task, from bad to good.

Learning goes by rounds: update the agent on all episodes so far, play some more with it, write
them down. The agent of a round is stored after its episodes, so an interrupted collection goes on
where it stopped and ends in the same numbers as one that was never interrupted.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from exorl.collect import ddpg
from exorl.collect.config import CollectConfig
from exorl.collect.folder import missing
from exorl.collect.play import generators, play
from exorl.episodes import Episode, find, read, write
from exorl.simulation import Simulation
from exorl.tasks import Task
from exorl.tasks import task as find_task

STATE = "learner.state"
LEARNING = 1  # sets the randomness of learning apart from that of episodes


def collect(config: CollectConfig) -> int:
    """Makes the missing episodes and returns how many they were.

    Raises:
        FileNotFoundError: An episode that the stored agent learned from is gone.
    """
    task, size = find_task(config.task), config.learner.episodes_per_round
    rounds = math.ceil(config.steps / (size * task.episode_length))
    rng = np.random.default_rng((config.seed, 0, LEARNING))
    learner = ddpg.init(config.learner, rng, task.observation_dim, task.action_dim)
    first, learner = _load(config.folder / STATE, learner)
    replay = _read_replay(config.folder, task, filled=first * size, room=max(first, rounds) * size)

    updates = round(config.learner.updates_per_step * size * task.episode_length)
    simulation = Simulation(config.task, size)
    with tqdm(
        desc=f"{config.task} supervised",
        total=rounds * size,
        initial=first * size,
        unit="episode",
        disable=None,  # without a terminal
    ) as bar:
        for number in range(first, rounds):
            if number >= config.learner.uniform_rounds:
                rng = np.random.default_rng((config.seed, number, LEARNING))
                batches = ddpg.sample(config.learner, replay, number * size, updates, rng)
                learner = ddpg.learn(config.learner, learner, batches)
            indices = range(number * size, (number + 1) * size)
            episodes = _play_round(config, simulation, learner, indices, number)
            for index, episode in zip(indices, episodes, strict=True):
                write(config.folder, index, episode)
                _remember(replay, index, episode)
            _save(config.folder / STATE, number + 1, learner)
            bar.update(size)
            mean = np.mean([episode.reward.sum() for episode in episodes])
            bar.set_postfix({"return": f"{mean:.0f}"})
    return max(rounds - first, 0) * size


def _play_round(
    config: CollectConfig,
    simulation: Simulation,
    learner: ddpg.Learner,
    indices: Sequence[int],
    number: int,
) -> list[Episode]:
    rngs = generators(config.seed, indices)
    starts = [int(rng.integers(2**32)) for rng in rngs]
    shape = (simulation.task.episode_length, simulation.task.action_dim)
    uniform = number < config.learner.uniform_rounds
    if uniform:
        noise = np.stack([rng.uniform(-1, 1, shape) for rng in rngs])
    else:
        noise = np.stack([rng.normal(0, config.learner.noise, shape) for rng in rngs])

    def policy(t: int, observation: np.ndarray) -> np.ndarray:
        action = 0 if uniform else np.asarray(ddpg.policy(learner.actor, observation))
        return np.clip(action + noise[:, t], -1, 1).astype(np.float32)

    return play(simulation, starts, policy)


def _read_replay(folder: Path, task: Task, filled: int, room: int) -> ddpg.Replay:
    """A replay with room for so many episodes, the first of them read from the folder."""
    rows = task.episode_length + 1
    replay = ddpg.Replay(
        observation=np.zeros((room, rows, task.observation_dim), np.float32),
        action=np.zeros((room, rows, task.action_dim), np.float32),
        reward=np.zeros((room, rows), np.float32),
    )
    if gone := missing(folder, filled):
        raise FileNotFoundError(
            f"{folder}: episode {gone[0]} is gone, which the agent in {STATE} learned from; "
            "put it back, or remove the folder to start again"
        )
    for file in find(folder):
        if file.index < filled:
            _remember(replay, file.index, read(file.path, task))
    return replay


def _remember(replay: ddpg.Replay, index: int, episode: Episode) -> None:
    replay.observation[index] = episode.observation
    replay.action[index] = episode.action
    replay.reward[index] = episode.reward[:, 0]


def _save(path: Path, rounds: int, learner: ddpg.Learner) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(partial, "wb") as file:
        np.savez(file, np.array(rounds), *jax.tree.leaves(learner))
    os.replace(partial, path)


def _load(path: Path, fresh: ddpg.Learner) -> tuple[int, ddpg.Learner]:
    """The rounds played and the agent that played the last of them; none and `fresh` at first."""
    if not path.exists():
        return 0, fresh
    with np.load(path) as file:
        rounds, *leaves = (file[f"arr_{i}"] for i in range(len(file.files)))
    return int(rounds), jax.tree.unflatten(jax.tree.structure(fresh), leaves)
