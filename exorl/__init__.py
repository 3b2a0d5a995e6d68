"""ExoRL: its tasks, environments, episodes and rewards.

env = exorl.make("cheetah_run", seed=0)
store = exorl.pack(["datasets/cheetah/rnd"], "cheetah", domain="cheetah")
rewards = exorl.relabel.rewards(store, "cheetah_run_backward")
"""

from exorl import relabel
from exorl.environments import Environment, make
from exorl.episodes import Episode, EpisodeError
from exorl.packing import pack
from exorl.paths import home
from exorl.rewards import reward
from exorl.simulation import Simulation, SimulationError, Step
from exorl.store import EpisodeStore, StoreError
from exorl.suite import VersionError
from exorl.tasks import (
    HIDDEN_GROUPS,
    TASKS,
    Task,
    TaskError,
    domain_tasks,
    normalized,
    task,
)

__all__ = [
    "HIDDEN_GROUPS",
    "TASKS",
    "Environment",
    "Episode",
    "EpisodeError",
    "EpisodeStore",
    "Simulation",
    "SimulationError",
    "Step",
    "StoreError",
    "Task",
    "TaskError",
    "VersionError",
    "domain_tasks",
    "home",
    "make",
    "normalized",
    "pack",
    "relabel",
    "reward",
    "task",
]
