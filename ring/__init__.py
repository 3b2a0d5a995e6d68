"""Exact attention for sequences of any length, on one device or around a ring of them.

Axis letters, here and in all of exoring:

    B  chains in a batch        H  heads                 K  tokens in a block
    T  tokens                   D  dimension of a head   R  devices in the ring
    S  environment steps        E  width of the model

Imports nothing else of exoring.
"""

from ring import cost, layout
from ring.attention import Implementation, attention
from ring.decode import KV, decode_attention
from ring.feedforward import blockwise_feedforward
from ring.mesh import make_mesh
from ring.ring import ring_attention_local

__all__ = [
    "KV",
    "Implementation",
    "attention",
    "blockwise_feedforward",
    "cost",
    "decode_attention",
    "layout",
    "make_mesh",
    "ring_attention_local",
]
