"""What a transformer costs: floating-point operations, bytes of activations, when a ring pays.

A multiply-add is two operations. Causal attention counts half; what rematerialisation computes a
second time is not counted, so that model FLOPs utilisation does not reward recomputation.
"""

from typing import Literal

Memory = Literal["plain", "memory_efficient", "bpt", "ring"]


def attention_flops(
    batch: int, length: int, heads: int, head_dim: int, causal: bool = True, backward: bool = False
) -> float:
    """Operations of the products with the scores: 4 B T² H D forward, halved if causal.

    With `backward`, forward and backward together: 3.5 times as many, for the backward pass has
    five products (the scores again, and the gradients of q, k, v and the weights) to the forward's
    two. `training_flops` leaves the recomputed scores out.
    """
    forward = 4 * batch * length**2 * heads * head_dim
    return forward * (0.5 if causal else 1) * (3.5 if backward else 1)


def forward_flops(
    layers: int, width: int, length: int, feedforward_ratio: float = 4, causal: bool = True
) -> float:
    """Operations of one sequence forward: T (8 + 4 ratio) E² + 4 T² E a layer, T² halved if causal.

    Query, key, value and output projections, attention, and a feed-forward of hidden size
    `feedforward_ratio` · E; embeddings and the head are left out. With ratio 4 and full attention
    this is the 24 s h² + 4 s² h of the Ring Attention paper (arXiv 2310.01889, appendix D).
    """
    projections = (8 + 4 * feedforward_ratio) * length * width**2
    attention = attention_flops(1, length, 1, width, causal)
    return layers * (projections + attention)


def training_flops(
    layers: int, width: int, length: int, feedforward_ratio: float = 4, causal: bool = True
) -> float:
    """Operations of one sequence forward and backward: three times `forward_flops`."""
    return 3 * forward_flops(layers, width, length, feedforward_ratio, causal)


def minimum_block(flops_per_second: float, bytes_per_second: float) -> float:
    """Tokens a device needs so that sending K and V hides behind computing: c ≥ F / B.

    A pair of blocks takes 4 d c² operations and sends 4 c d bytes (two bytes a number; arXiv
    2310.01889, section 3). With G query heads to a key head it is G times less; with float32
    twice, and causal attention does half the work a hop, so twice again.
    """
    return flops_per_second / bytes_per_second


def activation_bytes(
    memory: Memory,
    batch: int,
    length: int,
    width: int,
    heads: int,
    ring_size: int = 1,
) -> float:
    """Peak bytes of activations a layer needs on a device, at two bytes a number.

    The maximum activation sizes of arXiv 2310.01889, table 1 (b batch, h width, n heads, s length,
    c block): `plain` 2 b n s², `memory_efficient` 8 b s h, `bpt` 2 b s h, `ring` 6 b c h, where a
    device's whole shard c = s / R travels as one block. Float32 takes twice as much. For what a
    compiler really reserves, ask the compiler.

    Raises:
        ValueError: `memory` is none of the four.
    """
    if memory == "plain":
        return 2 * batch * heads * length**2
    if memory == "memory_efficient":
        return 8 * batch * length * width
    if memory == "bpt":
        return 2 * batch * length * width
    if memory == "ring":
        return 6 * batch * (length / ring_size) * width
    raise ValueError(f"memory {memory!r} is not one of plain, memory_efficient, bpt, ring")
