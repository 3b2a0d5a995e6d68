"""What a transformer costs: floating-point operations, bytes of activations, when a ring pays.

A multiply-add is two operations. Causal attention counts half; what rematerialisation computes a
second time is not counted, so that model FLOPs utilisation does not reward recomputation.

"The paper" is Ring Attention (Liu, Zaharia & Abbeel 2023, arXiv 2310.01889). Its letters: b batch,
s sequence length, h width (also d), n heads, c tokens of a device's block; F operations and B bytes
a second of a device and of its link to the next.
"""

from typing import Literal, NamedTuple

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


def sequence_flops(
    layers: int, width: int, length: int, feedforward_ratio: float = 4, causal: bool = True
) -> float:
    """Operations of one sequence forward: T (8 + 4 ratio) E² + 4 T² E a layer, T² halved if causal.

    Query, key, value and output projections, attention, and a feed-forward of hidden size
    `feedforward_ratio` · E; embeddings and the head are left out. With ratio 4 and full attention
    this is the paper's (24 b s h² + 4 b s² h) a layer for b = 1 (appendix D).
    """
    projections = (8 + 4 * feedforward_ratio) * length * width**2
    attention = attention_flops(1, length, 1, width, causal)
    return layers * (projections + attention)


def training_flops(
    layers: int, width: int, length: int, feedforward_ratio: float = 4, causal: bool = True
) -> float:
    """Operations of one sequence forward and backward: three times `sequence_flops`."""
    return 3 * sequence_flops(layers, width, length, feedforward_ratio, causal)


def dataset_flops_ratio(width: int, length: int, longer: int) -> float:
    """How much dearer a data set of given tokens gets in sequences of `longer` than of `length`.

    (6 h + s₂) / (6 h + s₁): operations a sequence of s₂ tokens over those of s₁, divided by s₂ / s₁
    for there are fewer sequences. Full attention, feed-forward of four widths (appendix D of the
    paper); `sequence_flops` gives the causal ratio, (12 h + s₂) / (12 h + s₁).
    """
    return (6 * width + longer) / (6 * width + length)


def minimum_block(flops_per_second: float, bytes_per_second: float) -> float:
    """Tokens a device needs so that sending K and V hides behind computing: c ≥ F / B.

    A hop takes 4 d c² operations and sends 4 c d bytes, see `hop_times` (section 3 of the paper).
    With G query heads to a key head a G-th will do; float32 needs twice as many, and causal
    attention, with half the work a hop, twice again.
    """
    return flops_per_second / bytes_per_second


def minimum_sequence(flops_per_second: float, bytes_per_second: float) -> float:
    """Tokens of sequence a device needs by the paper's table 2: 6 c, six minimum blocks.

    Six are held at once: queries, keys, values, the keys and values under way, and the output.
    """
    return 6 * minimum_block(flops_per_second, bytes_per_second)


class HopTimes(NamedTuple):
    """Seconds that one hop of the ring computes and sends; they run at the same time."""

    compute: float
    transfer: float

    def ring(self, ring_size: int) -> float:
        """Seconds of a forward pass around the ring: T ≈ R · max(compute, transfer)."""
        return ring_size * max(self)


def hop_times(
    block: float, width: int, flops_per_second: float, bytes_per_second: float
) -> HopTimes:
    """Seconds of one hop, for one layer and sequence: 4 d c² / F and 4 c d / B.

    Two products of 2 d c² operations over c queries and c keys, no mask, and K and V at two bytes a
    number (section 3 of the paper). Equal at c = `minimum_block`; above, computing hides sending.
    """
    return HopTimes(
        compute=4 * width * block**2 / flops_per_second,
        transfer=4 * block * width / bytes_per_second,
    )


def maximum_length(block: int, devices: int, other_axes: int = 1) -> int:
    """Tokens of the longest sequence, R · c, if a device holds at most c = `block` of them.

    The ring has R = `devices` / `other_axes`, the product of all other mesh axes (appendix A of the
    paper shards models over `fsdp`).

    Raises:
        ValueError: `other_axes` does not divide `devices`.
    """
    if devices % other_axes:
        raise ValueError(
            f"{devices} devices do not divide over other mesh axes of {other_axes}; "
            f"{-(-devices // other_axes) * other_axes} would"
        )
    return devices // other_axes * block


def inference_ratio(flops_per_second: float, bytes_per_second: float) -> float:
    """Bytes sent in the time of one operation, B / F: a cache that circulates hides if it is ≥ 2.

    From d² / F ≥ 2 d² / B for a single new token (appendix C of the paper). The paper's 2.4 is
    gigabytes over teraflops: 0.0024 bytes an operation, and the rest of its table 2 is no better.
    Hence `ring.decode_attention` leaves caches where they are and merges partial results instead.
    """
    return bytes_per_second / flops_per_second


def activation_bytes(
    memory: Memory,
    batch: int,
    length: int,
    width: int,
    heads: int,
    ring_size: int = 1,
) -> float:
    """Peak bytes of activations a layer needs on a device, at two bytes a number.

    The maximum activation sizes of the paper's table 1: `plain` 2 b n s² (its column of totals
    prints h for n), `memory_efficient` 8 b s h, `bpt` 2 b s h, `ring` 6 b c h, where a device's
    whole shard c = s / R travels as one block. Float32 takes twice as much. For what a compiler
    really reserves, ask the compiler.

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
