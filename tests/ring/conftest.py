"""An attention written a second time, in float64 NumPy, with the gradients spelled out."""

import numpy as np
import pytest


def _both_sides(value, lengths, batch):
    pair = value if isinstance(value, tuple) else (value, value)
    return [np.broadcast_to(x, (batch, n)) for x, n in zip(pair, lengths, strict=True)]


def _attention(q, k, v, dout, dlse=None, *, causal=True, order=None, segments=None, scale=None):
    """Returns out, lse, dq, dk, dv; one batch row and one head at a time, one full score matrix."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    (batch, q_length, heads, width), (_, k_length, key_heads, _) = q.shape, k.shape
    lengths = q_length, k_length
    if order is None:
        order = tuple(np.arange(n) for n in lengths)
    q_order, k_order = _both_sides(order, lengths, batch)
    q_segment, k_segment = _both_sides(
        (np.zeros(q_length), np.zeros(k_length)) if segments is None else segments, lengths, batch
    )
    scale = 1 / np.sqrt(width) if scale is None else scale
    dlse = np.zeros((batch, heads, q_length)) if dlse is None else np.asarray(dlse, np.float64)
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    lse = np.full((batch, heads, q_length), -np.inf)
    for b in range(batch):
        seen = (q_order[b][:, None] >= 0) & (k_order[b][None] >= 0)
        seen &= q_segment[b][:, None] == k_segment[b][None]
        if causal:
            seen &= k_order[b][None] <= q_order[b][:, None]
        some = seen.any(1)
        for h in range(heads):
            shared = h * key_heads // heads
            scores = np.where(seen, q[b, :, h] @ k[b, :, shared].T * scale, -np.inf)
            shifted = np.exp(scores[some] - scores[some].max(1, keepdims=True))
            weights = np.zeros_like(scores)
            weights[some] = shifted / shifted.sum(1, keepdims=True)
            lse[b, h, some] = np.log(shifted.sum(1)) + scores[some].max(1)
            out[b, :, h] = weights @ v[b, :, shared]
            dweights = dout[b, :, h] @ v[b, :, shared].T
            inner = (weights * dweights).sum(1, keepdims=True)
            dscores = weights * (dweights - inner + dlse[b, h][:, None]) * scale
            dq[b, :, h] = dscores @ k[b, :, shared]
            dk[b, :, shared] += dscores.T @ q[b, :, h]
            dv[b, :, shared] += weights.T @ dout[b, :, h]
    return out, lse, dq, dk, dv


@pytest.fixture(scope="session")
def oracle():
    return _attention
