"""Which token sits where along the ring: permutations of the sequence, and how they balance work.

A layout is a permutation p: position i of the laid-out sequence holds element p[i] of the original,
and device r of R owns positions r·T/R … (r+1)·T/R − 1. Elements are tokens, or steps of several
tokens each. Attention never sees a layout, only each token's `order`, so every layout computes the
same function; they differ in which device works how much. All in NumPy.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ring.tokens import PADDING

LAST = np.iinfo(np.int32).max  # where no token is, in place of its order or segment


def contiguous(length: int, ring_size: int) -> np.ndarray:
    """Device r holds the r-th stretch of the sequence: the identity, int64 [length].

    Under a causal mask the last device works longest, about 2 − 1/R times the mean.

    Raises:
        ValueError: `length` is not a multiple of `ring_size`.
    """
    _check(length, ring_size, 1, "")
    return np.arange(length)


def zigzag(length: int, ring_size: int) -> np.ndarray:
    """Of 2R chunks of the sequence device r holds chunks r and 2R − 1 − r: int64 [length].

    A cheap early chunk goes with a dear late one. Under a causal mask all devices visit the same
    number of block pairs, in every hop, and together no more than under `contiguous`, provided
    that no block straddles two chunks. The layout of choice where there are no segments.

    Zhu 2024, github.com/zhuzilin/ring-flash-attention; Llama 3 (arXiv 2407.21783, section 3.3.2).

    Raises:
        ValueError: `length` is not a multiple of 2 · `ring_size`.
    """
    _check(length, ring_size, 2, " in 2 chunks each")
    return _deal(length, ring_size, length // (2 * ring_size))


def striped(length: int, ring_size: int, stripe: int = 1) -> np.ndarray:
    """Stripes of `stripe` elements are dealt to the devices, forth and back: int64 [length].

    Striped Attention (Brandon et al. 2023, arXiv 2311.09431) has stripes of one. Then the i-th
    blocks of all devices cover the same stretch of R blocks: whatever the mask, all devices do the
    same, but more of it. With n blocks a device a causal mask visits (R n + R) / (R n + 1) times as
    many pairs as under `contiguous`; segments shorter than the stretch visit a multiple.

    Stripes of one block (`block_size` = `stripe`, in tokens) visit no more pairs than `contiguous`.
    Dealt forth and back, an even number of them balances a causal mask exactly, `zigzag` being the
    case of two; the paper deals always forth, where the last device, whose stripes come last, would
    work (R n + R) / (R n + 1) times the mean. They nearly balance long packed segments of unequal
    length too, since each lies on all devices: the choice for those. Segments much shorter than a
    shard are balanced by `contiguous` already.

    Raises:
        ValueError: `stripe` is not positive, or `length` not a multiple of `ring_size` · `stripe`.
    """
    if stripe < 1:
        raise ValueError(f"stripe {stripe} must be positive")
    _check(length, ring_size, stripe, f" in stripes of {stripe}")
    return _deal(length, ring_size, stripe)


def inverse(permutation: np.ndarray) -> np.ndarray:
    """The permutation that undoes `permutation`: `x[p][inverse(p)]` is `x`."""
    undo = np.empty_like(permutation)
    undo[permutation] = np.arange(len(permutation), dtype=permutation.dtype)
    return undo


def _check(length: int, ring_size: int, each: int, how: str) -> None:
    """Refuses a length that does not give every device a multiple of `each` elements."""
    if ring_size < 1:
        raise ValueError(f"ring_size {ring_size} must be positive")
    if length < 1 or length % (ring_size * each):
        above = max(-(-length // (ring_size * each)), 1) * ring_size * each
        raise ValueError(
            f"length {length} does not divide over a ring of {ring_size}{how}; pad it to {above}"
        )


def _deal(length: int, ring_size: int, stripe: int) -> np.ndarray:
    rounds = np.arange(length).reshape(-1, ring_size, stripe)
    rounds[1::2] = rounds[1::2, ::-1].copy()
    return rounds.swapaxes(0, 1).ravel()


def blocks_in(length: int, block_size: int) -> int:
    """How many equal blocks of at most `block_size` tokens a shard of `length` is cut into.

    One if it fits, or else the fewest that are even in number: then half of them cover each of the
    two chunks of `zigzag`, where these divide evenly. Where not, a block or two lies on both: of
    64,000 tokens in 126 blocks one, and by `work` the busiest of 8 devices does 0.7 % more than
    the mean.
    """
    return 1 if length <= block_size else 2 * -(-length // (2 * block_size))


class Work(NamedTuple):
    """Block pairs that the devices of a ring compute, as many forward as backward."""

    visited: np.ndarray  # int64 [R]: by device, over all R hops; the others are skipped
    slowest: int  # the busiest device's visited pairs of each hop, summed: the ring waits for it
    pairs: int  # all pairs of blocks, skipped or not

    @property
    def imbalance(self) -> float:
        """Visited pairs of the busiest device over the mean; 1 is perfect, and 1 if none are."""
        mean = self.visited.mean()
        return float(self.visited.max() / mean) if mean else 1.0


def work(
    order: ArrayLike,
    segments: ArrayLike | None = None,
    *,
    ring_size: int,
    block_size: int,
    causal: bool = True,
) -> Work:
    """What ring attention of a laid-out sequence to itself makes every device do.

    Pads, cuts and skips block pairs as `ring.attention` does, from ranges of order and segment.

    Args:
        order: Integers [T] or [B, T], already laid out; −1 is padding. Batch rows count as worked
            on together: a pair is skipped if no row sees through it.
        segments: Like `order`.
        ring_size: Devices in the ring.
        block_size: Upper bound on the block length, in tokens.
        causal: False: tokens see their segment whatever the order.

    Raises:
        ValueError: Sizes are not positive, or shapes or dtypes do not fit.
    """
    places, groups = _rows(order, np.zeros_like(order) if segments is None else segments)
    if ring_size < 1 or block_size < 1:
        raise ValueError(f"ring_size {ring_size} and block_size {block_size} must be positive")
    if not causal:
        places = np.where(places < 0, PADDING, 0)
    blocks = _ranges(*(_cut(x, ring_size, block_size) for x in (places, groups)))
    visited = np.zeros((ring_size, ring_size), np.int64)  # [device, source of the keys]
    for device in range(ring_size):
        own = _Ranges(*(x[device][:, None, None] for x in blocks))
        visited[device] = _visited(own, blocks).sum((0, 2))
    devices = np.arange(ring_size)
    hops = visited[devices, (devices - devices[:, None]) % ring_size]  # [hop, device]
    pairs = (ring_size * blocks.latest.shape[1]) ** 2
    return Work(visited.sum(1), int(hops.max(1).sum()), pairs)


def _rows(order: ArrayLike, segments: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Both as [B or 1, T].

    Raises:
        ValueError: They are not integers [T] or [B, T], not empty, of one B and T.
    """
    places, groups = np.atleast_2d(np.asarray(order), np.asarray(segments))
    batches = {len(places), len(groups)} - {1}
    if (
        not places.ndim == groups.ndim == 2
        or places.shape[1] != groups.shape[1]
        or len(batches) > 1
        or not places.size
        or not all(np.issubdtype(x.dtype, np.integer) for x in (places, groups))
    ):
        raise ValueError(
            f"order is {places.dtype}{list(np.shape(order))}, segments are "
            f"{groups.dtype}{list(np.shape(segments))}; expected integers [T] or [B, T] for both"
        )
    return places, groups


class _Ranges(NamedTuple):
    """What decides over a block: extremes of order and segment, [R, blocks, rows] each."""

    latest: np.ndarray  # of order
    earliest: np.ndarray  # likewise, among tokens that are not padding
    first: np.ndarray  # of segment, likewise
    last: np.ndarray


def _cut(x: np.ndarray, ring_size: int, block_size: int) -> np.ndarray:
    """[rows, T] to [R, blocks, rows, K]; the end, then that of every shard, is padded."""
    shards = _pad(x, ring_size).reshape(len(x), ring_size, -1)
    blocks = blocks_in(shards.shape[-1], block_size)
    return _pad(shards, blocks).reshape(len(x), ring_size, blocks, -1).transpose(1, 2, 0, 3)


def _pad(x: np.ndarray, multiple: int) -> np.ndarray:
    missing = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % multiple)]
    return np.pad(x, missing, constant_values=PADDING)


def _ranges(order: np.ndarray, segment: np.ndarray) -> _Ranges:
    padding = order < 0
    return _Ranges(
        order.max(-1),
        np.where(padding, LAST, order).min(-1),
        np.where(padding, LAST, segment).min(-1),
        np.where(padding, -LAST, segment).max(-1),
    )


def _visited(q: _Ranges, k: _Ranges) -> np.ndarray:
    """Which pairs are visited: `ring.blocks.block_pairs` in NumPy."""
    active = (k.earliest <= q.latest) & (q.first <= k.last) & (k.first <= q.last)
    return np.any(active, -1)
