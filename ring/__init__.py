"""Exact attention for sequences of any length, on one device or around a ring of them.

Axis letters, here and in all of exoring:

    B  chains in a batch        H  heads                 K  tokens in a block
    T  tokens                   D  dimension of a head   R  devices in the ring
    S  environment steps        E  width of the model

Online softmax. With scores s_j = q · k_j / √D to the keys that it sees, a query attends to

    out = Σ_j exp(s_j) v_j / Σ_j exp(s_j)

Both sums may be taken a block of keys at a time. So that exp stays in range they are kept relative
to the highest score m so far: l = Σ exp(s_j − m) and a = Σ exp(s_j − m) v_j, at first m = −∞ and
l = a = 0. Another block of keys, with scores s_j and values v_j, makes of them

    m' = max(m, max_j s_j)
    l' = exp(m − m') l + Σ_j exp(s_j − m')
    a' = exp(m − m') a + Σ_j exp(s_j − m') v_j

and after the last block out = a / l, with the log-sum-exp lse = m + log l. The result does not
depend on the order of the blocks, and states of different keys merge by the same rule
(`decode_attention`). Only one block of scores ever exists, not T².

Backward. From lse any block of weights can be computed again, p_j = exp(s_j − lse). With
dp_j = dout · v_j, and d = dout · out, which is Σ_j p_j dp_j, known before the first block:

    ds_j = p_j (dp_j − d + dlse)       dq = Σ_j ds_j k_j / √D
    dv_j = Σ_q p_j dout                dk_j = Σ_q ds_j q / √D

where Σ_q sums over queries. Again blocks may come in any order; out and lse are all that is saved.

The ring. Device r of R keeps its T / R queries with m, l and a. In hop h = 0 … R − 1 it works on
the keys and values of device (r − h) mod R, while it sends them on to device r + 1: after at most
R − 1 messages every query has met every key that it sees. The backward pass goes around once more,
dk and dv following a hop behind, and one further, home. A device holds T / R tokens however long
the sequence, and sending hides behind computing if these are enough (`ring.cost`).

What a query sees is decided by each token's order and segment, not by where it lies: so a layout is
free to balance the devices' work (`ring.layout`), and pairs of blocks that see nothing are skipped.

Milakov & Gimelshein 2018 (arXiv 1805.02867), Dao 2023 (2307.08691), Liu, Zaharia & Abbeel 2023
(2310.01889). The same in plain NumPy: tests/ring/numpy_ring.py. Imports nothing else of exoring.
"""

from ring import cost, layout
from ring.attention import Implementation, attention
from ring.decode import KV, decode_attention
from ring.feedforward import blockwise_feedforward
from ring.mass import attention_mass
from ring.mesh import make_mesh, simulate_devices
from ring.ring import ring_attention_local

__all__ = [
    "KV",
    "Implementation",
    "attention",
    "attention_mass",
    "blockwise_feedforward",
    "cost",
    "decode_attention",
    "layout",
    "make_mesh",
    "ring_attention_local",
    "simulate_devices",
]
