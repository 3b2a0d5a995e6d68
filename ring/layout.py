"""Which token sits where along the ring: permutations of the sequence, in NumPy.

A layout is a permutation p: position i of the laid-out sequence holds element p[i] of the original,
and device r of R owns positions r·T/R … (r+1)·T/R − 1. Attention never sees a layout, only each
token's `order`, so every layout computes the same function.
"""

import numpy as np


def contiguous(length: int, ring_size: int) -> np.ndarray:
    """Device r holds the r-th stretch of the sequence: the identity, int64 [length].

    Under a causal mask the last device works longest, about 2 − 1/R times the mean.

    Raises:
        ValueError: `length` is not a multiple of `ring_size`.
    """
    if ring_size < 1 or length % ring_size:
        above = -(-length // max(ring_size, 1)) * max(ring_size, 1)
        raise ValueError(
            f"length {length} does not divide over a ring of {ring_size}; pad it to {above}"
        )
    return np.arange(length)


def inverse(permutation: np.ndarray) -> np.ndarray:
    """The permutation that undoes `permutation`: `x[p][inverse(p)]` is `x`."""
    undo = np.empty_like(permutation)
    undo[permutation] = np.arange(len(permutation), dtype=permutation.dtype)
    return undo
