"""Ring attention to be read: devices are a list, sending is moving along it; float64 NumPy.

One sequence and one head at a time, one block a device. Nothing is skipped and nothing overlaps,
so what remains is the algorithm: Liu, Zaharia & Abbeel 2023 (arXiv 2310.01889) around the online
softmax of Milakov & Gimelshein 2018 (1805.02867), and the backward pass of Dao 2023 (2307.08691).
"""

from dataclasses import dataclass, field

import numpy as np

FLOOR = -1e30  # a maximum over nothing; finite, so that exp(−inf − FLOOR) is 0


@dataclass
class Device:
    """What stays on a device: its queries [T, D] and all that is added up for them."""

    q: np.ndarray
    order: np.ndarray
    segment: np.ndarray
    highest: np.ndarray = field(init=False)  # [T] the highest score m so far
    total: np.ndarray = field(init=False)  # [T] Σ exp(score − m)
    values: np.ndarray = field(init=False)  # [T, D] Σ exp(score − m) · v

    def __post_init__(self):
        self.highest = np.full(len(self.q), FLOOR)
        self.total = np.zeros(len(self.q))
        self.values = np.zeros_like(self.q)


@dataclass
class Block:
    """What travels: keys and values [T, D], and on the way back their gradients."""

    k: np.ndarray
    v: np.ndarray
    order: np.ndarray
    segment: np.ndarray
    dk: np.ndarray = field(init=False)
    dv: np.ndarray = field(init=False)

    def __post_init__(self):
        self.dk, self.dv = np.zeros_like(self.k), np.zeros_like(self.v)


def pass_on(blocks):
    """Every device hands its block to the next, and the last to the first."""
    return blocks[-1:] + blocks[:-1]


def scores(device, block):
    """q · k / √D, and −inf where a query does not see a key: [Tq, Tk]."""
    seen = (block.order >= 0) & (block.order <= device.order[:, None])
    seen &= block.segment == device.segment[:, None]
    return np.where(seen, device.q @ block.k.T / np.sqrt(device.q.shape[1]), -np.inf)


def attend(device, block):
    """Adds one block to the softmax of a device; what it had was relative to another maximum."""
    s = scores(device, block)
    highest = np.maximum(device.highest, s.max(1))
    shrink, weights = np.exp(device.highest - highest), np.exp(s - highest[:, None])
    device.total = shrink * device.total + weights.sum(1)
    device.values = shrink[:, None] * device.values + weights @ block.v
    device.highest = highest


def forward(devices, blocks):
    """R times attend, R − 1 times pass on; output and log-sum-exp of each device."""
    for hop in range(len(devices)):
        blocks = pass_on(blocks) if hop else blocks
        for device, block in zip(devices, blocks, strict=True):
            attend(device, block)
    with np.errstate(divide="ignore"):
        lse = [device.highest + np.log(device.total) for device in devices]
    return [d.values / np.where(d.total > 0, d.total, 1)[:, None] for d in devices], lse


def backward(devices, blocks, out, lse, dout, dlse):
    """Gradients of the queries; those of keys and values are left in the blocks.

    With p = exp(score − lse), the weights of the softmax: dv = pᵀ dout and dp = dout vᵀ, and
    ds = p (dp − Σ p dp + dlse) where Σ p dp = dout · out. R times passed on, every block is home.
    """
    dq = [np.zeros_like(device.q) for device in devices]
    for _ in devices:
        for r, (device, block) in enumerate(zip(devices, blocks, strict=True)):
            p = np.exp(scores(device, block) - np.where(lse[r] == -np.inf, 0, lse[r])[:, None])
            dp = dout[r] @ block.v.T
            ds = p * (dp - (dout[r] * out[r]).sum(1)[:, None] + dlse[r][:, None])
            ds /= np.sqrt(device.q.shape[1])
            dq[r] += ds @ block.k
            block.dk += ds.T @ device.q
            block.dv += p.T @ dout[r]
        blocks = pass_on(blocks)
    return dq


def head(q, k, v, dout, dlse, query, key, ring_size):
    """out, lse, dq, dk, dv of one head; query and key are (order, segment) of their side."""

    def deal(*arrays):  # shards may differ by one in length
        return zip(*(np.array_split(x, ring_size) for x in arrays), strict=True)

    devices = [Device(*shard) for shard in deal(q, *query)]
    blocks = [Block(*shard) for shard in deal(k, v, *key)]
    out, lse = forward(devices, blocks)
    dout, dlse = zip(*deal(dout, dlse), strict=True)
    dq = backward(devices, blocks, out, lse, dout, dlse)
    parts = out, lse, dq, [block.dk for block in blocks], [block.dv for block in blocks]
    return tuple(np.concatenate(x) for x in parts)


def ring_attention(q, k, v, dout, dlse=None, *, ring_size, causal=True, order=None, segments=None):
    """out, lse, dq, dk, dv for the arguments of `ring.attention`: a loop over rows and heads."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    (batch, q_length, heads, _), (_, k_length, key_heads, _) = q.shape, k.shape
    sides = q_length, k_length

    def tokens(value, default):
        pair = value if isinstance(value, tuple) else (value, value)
        return [
            np.broadcast_to(default(n) if x is None else x, (batch, n))
            for x, n in zip(pair, sides, strict=True)
        ]

    order, segments = tokens(order, np.arange), tokens(segments, np.zeros)
    if not causal:  # all tokens share one place, all but the padding
        order = [np.minimum(x, 0) for x in order]
    dlse = np.zeros((batch, heads, q_length)) if dlse is None else dlse
    out, lse = np.zeros_like(q), np.zeros(dlse.shape)
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    for b in range(batch):
        query, key = ((order[side][b], segments[side][b]) for side in range(2))
        for h in range(heads):
            shared = h * key_heads // heads
            operands = q[b, :, h], k[b, :, shared], v[b, :, shared], dout[b, :, h], dlse[b, h]
            of_head = head(*operands, query, key, ring_size)
            out[b, :, h], lse[b, h], dq[b, :, h] = of_head[:3]
            dk[b, :, shared] += of_head[3]
            dv[b, :, shared] += of_head[4]
    return out, lse, dq, dk, dv
