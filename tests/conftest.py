"""One process tests every mesh: eight simulated CPU devices, no display, no network."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

# Read by JAX and dm_control when they are first imported, so set before anything else here.
os.environ.setdefault("MUJOCO_GL", "disabled")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ.setdefault("PJRT_NPROC", "10")  # see ring.simulate_devices
# One test's programs are compiled once for all tests, worker processes included, and forgotten
# when they end.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="exoring-compiled-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import numpy as np
import pytest

import exorl


def simulate(folder: Path, *, episodes: int, length: int, seed: int = 0) -> Path:
    """Cheetah episodes of sinusoidal gaits, good and bad, simulated for real."""
    rng = np.random.default_rng(seed)
    simulation = exorl.Simulation("cheetah_run", episodes)
    steps = [simulation.reset(range(seed, seed + episodes))]
    actions = [np.zeros((episodes, 6), np.float32)]
    frequency = rng.uniform(0.05, 0.4, (episodes, 6))
    phase = rng.uniform(0, 2 * np.pi, (episodes, 6))
    for t in range(length):
        actions.append(np.sin(frequency * t + phase).astype(np.float32))
        steps.append(simulation.step(actions[-1]))
    for i in range(episodes):
        episode = exorl.Episode(
            observation=np.stack([step.observation[i] for step in steps]),
            action=np.stack([action[i] for action in actions]),
            reward=np.stack([step.reward[i : i + 1] for step in steps]),
            discount=np.ones((length + 1, 1), np.float32),
            physics=np.stack([step.physics[i] for step in steps]),
        )
        exorl.episodes.write(folder, i, episode)
    return folder


@pytest.fixture(scope="session")
def cheetah_episodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty short cheetah episodes in ExoRL's format."""
    folder = tmp_path_factory.mktemp("episodes") / "gaits"
    return simulate(folder, episodes=20, length=83)


@pytest.fixture(scope="session")
def cheetah_store(
    cheetah_episodes: Path, tmp_path_factory: pytest.TempPathFactory
) -> exorl.EpisodeStore:
    """The same, packed."""
    out = tmp_path_factory.mktemp("stores") / "cheetah"
    return exorl.pack([cheetah_episodes], out, domain="cheetah")


@pytest.fixture(scope="session")
def whole_store(tmp_path_factory: pytest.TempPathFactory) -> exorl.EpisodeStore:
    """Twenty cheetah episodes as long as the environment's, which contexts are drawn from."""
    folder = tmp_path_factory.mktemp("whole")
    simulate(folder / "gaits", episodes=20, length=1000)
    return exorl.pack([folder / "gaits"], folder / "store", domain="cheetah")
