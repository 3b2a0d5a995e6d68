"""Collects ExoRL episodes in dm_control: unrewarded random behaviour, or an agent that learns.

    from exorl.collect import CollectConfig, collect

    collect(CollectConfig("cheetah_run", "supervised", steps=120_000, out="episodes/run"))

writes what ExoRL publishes, one npz an episode (see `exorl.episodes`), and `collector.json`, which
says how they were made.
"""

from exorl.collect.collector import collect
from exorl.collect.config import CollectConfig, LearnerConfig

__all__ = ["CollectConfig", "LearnerConfig", "collect"]
