"""From stored trajectories to token batches: chains of hindsight as arrays over environment steps.

Letters: B chains in a batch, N trajectories in a chain, T environment steps in a trajectory,
S steps (or chunks of ``chunk`` environment steps) in a sequence, O observation, A action dims.
"""

from data.batches import Batch, place
from data.hindsight import Chain, Trajectory, chain, returns_to_go
from data.normalize import Normalizer
from data.packing import pack
from data.pool import Pool
from data.sampling import ChainSampler, WindowSampler

__all__ = [
    "Batch",
    "Chain",
    "ChainSampler",
    "Normalizer",
    "Pool",
    "Trajectory",
    "WindowSampler",
    "chain",
    "pack",
    "place",
    "returns_to_go",
]
