"""How evenly layouts spread a causal sequence's block pairs over a ring, counted, not timed.

Visited pairs of the busiest device over the mean; in brackets the pairs that the ring waits for,
its slowest device's in every hop, over what each device would do of contiguous pairs if they were
even.
"""

import argparse
from collections.abc import Iterator, Sequence

import numpy as np

from agent.tables import table
from ring import layout

BLOCK = 64
SHORT = 16 * BLOCK  # of a device
LONG = 64_000


def main(options: Sequence[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench balance", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of random lengths of segments")
    arguments = parser.parse_args(options)
    header = ["R", "segments", "contiguous", "zigzag", "striped, one token", "striped, one block"]
    print(table(header, list(rows(arguments.seed))))


def rows(seed: int) -> Iterator[list[str]]:
    """16 blocks of 64 tokens a device; the last row is 128 trajectories of 4,000 tokens."""
    for ring_size in (2, 4, 8):
        yield [str(ring_size), "none", *balance(None, ring_size, SHORT, BLOCK)]
    ring_size, length = 8, 8 * SHORT
    halves = np.repeat(np.arange(4), [length // 2, length // 4, length // 8, length // 8])
    yield ["8", "T/2, T/4, T/8, T/8", *balance(halves, ring_size, SHORT, BLOCK)]
    for count in (4, 16, 64):
        cuts = np.random.default_rng(seed).choice(np.arange(1, length), count - 1, replace=False)
        lengths = np.searchsorted(np.sort(cuts), np.arange(length), side="right")
        yield ["8", f"{count} of random length", *balance(lengths, ring_size, SHORT, BLOCK)]
    trajectories = np.arange(8 * LONG) // 4_000
    yield ["8", "128 of 4,000 tokens", *balance(trajectories, ring_size, LONG, 512)]


def balance(segments: np.ndarray | None, ring_size: int, each: int, block_size: int) -> list[str]:
    """Of every layout, for so many tokens a device and segments int [T] of the whole sequence."""
    length = ring_size * each
    permutations = [
        layout.contiguous(length, ring_size),
        layout.zigzag(length, ring_size),
        layout.striped(length, ring_size),
        layout.striped(length, ring_size, block_size),
    ]
    works = [
        layout.work(
            permutation,
            None if segments is None else segments[permutation],
            ring_size=ring_size,
            block_size=block_size,
        )
        for permutation in permutations
    ]
    even = works[0].visited.mean()
    return [f"{work.imbalance:.2f} ({work.slowest / even:.2f})" for work in works]
