"""Layouts are permutations; how they balance is counted as the ring itself would."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ring import layout
from ring.blocks import block_pairs, split_tokens
from ring.tokens import Tokens

LAYOUTS = {
    "contiguous": layout.contiguous,
    "zigzag": layout.zigzag,
    "striped": layout.striped,
    "stripes of 4": lambda length, ring_size: layout.striped(length, ring_size, 4),
}


@pytest.mark.parametrize("name", LAYOUTS)
@given(each=st.integers(1, 6), ring_size=st.integers(1, 8))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_layouts_are_permutations_that_inverse_undoes(name, each, ring_size):
    length = 4 * each * ring_size
    permutation = LAYOUTS[name](length, ring_size)
    np.testing.assert_array_equal(np.sort(permutation), np.arange(length))
    np.testing.assert_array_equal(permutation[layout.inverse(permutation)], np.arange(length))


@given(st.permutations(range(12)))
def test_inverse_undoes_any_permutation(permutation):
    permutation = np.array(permutation)
    x = np.arange(100, 112)
    np.testing.assert_array_equal(x[permutation][layout.inverse(permutation)], x)


def test_what_each_device_holds():
    def devices(permutation):
        return permutation.reshape(2, -1).tolist()

    assert devices(layout.contiguous(8, 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert devices(layout.zigzag(8, 2)) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert devices(layout.striped(8, 2)) == [[0, 3, 4, 7], [1, 2, 5, 6]]
    np.testing.assert_array_equal(layout.striped(24, 3, 4), layout.zigzag(24, 3))


@pytest.mark.parametrize(
    ("permutation", "message"),
    [
        (lambda: layout.contiguous(10, 4), "length 10 does not divide over a ring of 4; pad it to"),
        (lambda: layout.zigzag(12, 4), "a ring of 4 in 2 chunks each; pad it to 16"),
        (lambda: layout.striped(20, 4, 3), "a ring of 4 in stripes of 3; pad it to 24"),
        (lambda: layout.striped(20, 4, 0), "stripe 0 must be positive"),
        (lambda: layout.zigzag(0, 4), "pad it to 8"),
        (lambda: layout.contiguous(4, 0), "ring_size 0 must be positive"),
    ],
)
def test_layouts_refuse_with_a_way_out(permutation, message):
    with pytest.raises(ValueError, match=message):
        permutation()


@given(st.integers(1, 300), st.integers(1, 40))
def test_blocks_are_even_in_number_and_as_few_as_fit(length, block_size):
    blocks = layout.blocks_in(length, block_size)
    assert -(-length // blocks) <= block_size
    assert blocks == 1 if length <= block_size else blocks % 2 == 0
    assert blocks <= 2 or -(-length // (blocks - 2)) > block_size


def causal_work(name, ring_size, segments=None, blocks=16, block_size=4):
    """Work of a causal sequence of `blocks` blocks a device."""
    length = ring_size * blocks * block_size
    permutation = LAYOUTS[name](length, ring_size)
    if segments is not None:
        segments = segments[permutation]
    return layout.work(permutation, segments, ring_size=ring_size, block_size=block_size)


@pytest.mark.parametrize("ring_size", [2, 4, 8])
def test_balance_under_a_causal_mask(ring_size):
    least = 16 * ring_size * (16 * ring_size + 1) // 2
    contiguous = causal_work("contiguous", ring_size)
    assert contiguous.imbalance == pytest.approx(2 - 1 / ring_size, rel=0.02)
    assert contiguous.visited.sum() == least
    for name in ("zigzag", "stripes of 4"):  # the stripe is one block
        work = causal_work(name, ring_size)
        assert work.imbalance == 1
        assert work.visited.sum() == least
        assert work.slowest == work.visited[0]  # balanced in every hop, not only in sum
        assert work.pairs == (16 * ring_size) ** 2
    striped = causal_work("striped", ring_size)
    assert striped.imbalance == 1
    ratio = striped.visited.sum() / least
    assert ratio == pytest.approx((16 * ring_size + ring_size) / (16 * ring_size + 1))


def test_stripes_of_a_block_balance_packed_segments_of_unequal_length():
    segments = np.repeat(np.arange(6), [200, 90, 40, 120, 12, 50])
    work = {name: causal_work(name, 8, segments) for name in LAYOUTS}
    assert min(work, key=lambda name: work[name].slowest) == "stripes of 4"
    assert work["stripes of 4"].imbalance < 1.3 < work["zigzag"].imbalance
    assert work["striped"].imbalance < 1.2 and work["contiguous"].imbalance > 2
    # The same blocks lie elsewhere, but stripes of one token are blocks of eight times the reach.
    total = {name: work[name].visited.sum() for name in LAYOUTS}
    assert total["stripes of 4"] == total["zigzag"] == total["contiguous"]
    assert total["striped"] > 1.4 * total["contiguous"]


def test_full_attention_and_padding():
    order = np.where(np.arange(64) < 40, np.arange(64), -1)
    work = layout.work(order, ring_size=2, block_size=8, causal=False)
    # Four blocks a device; the second device has one that is not all padding.
    assert work.visited.tolist() == [20, 5]
    nothing = layout.work(np.full(8, -1), ring_size=2, block_size=8)
    assert (nothing.visited.tolist(), nothing.imbalance) == ([0, 0], 1)


def test_work_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"order is int64\[8\], segments are int64\[7\]"):
        layout.work(np.arange(8), np.arange(7), ring_size=2, block_size=4)
    with pytest.raises(ValueError, match=r"float64\[8\].*expected integers"):
        layout.work(np.arange(8.0), ring_size=2, block_size=4)
    with pytest.raises(ValueError, match="ring_size 2 and block_size 0 must be positive"):
        layout.work(np.arange(8), ring_size=2, block_size=0)


@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    ring_size=st.sampled_from([1, 2, 3]),
    each=st.sampled_from([8, 16, 28]),
    rows=st.tuples(*[st.sampled_from([None, 2])] * 2),
    block_size=st.sampled_from([3, 4, 7, 64]),
    segment_size=st.sampled_from([None, 5, 23]),
    padding=st.sampled_from([0.0, 0.2]),
    dropped=st.integers(0, 2),
    causal=st.booleans(),
    seed=st.integers(0, 2**16),
)
@example("zigzag", 2, 16, (None, None), 3, None, 0.3, 0, True, 0)
@example("striped", 3, 16, (2, 2), 4, 23, 0.3, 2, True, 1)
@settings(max_examples=8, deadline=None, derandomize=True)
def test_work_is_what_the_blocks_of_the_ring_say(
    name, ring_size, each, rows, block_size, segment_size, padding, dropped, causal, seed
):
    rng = np.random.default_rng(seed)
    length = ring_size * each
    permutation = LAYOUTS[name](length, ring_size)

    def of_rows(x, n):
        return x if n is None else np.stack([np.roll(x, 3 * row) for row in range(n)])

    order = of_rows(permutation.astype(np.int32), rows[0])
    order[rng.random(order.shape) < padding] = -1
    segments = None
    if segment_size is not None:
        segments = of_rows((permutation // segment_size).astype(np.int32), rows[1])
    kept = length - min(dropped, ring_size - 1)  # the ring pads it back
    work = layout.work(
        order[..., :kept],
        None if segments is None else segments[..., :kept],
        ring_size=ring_size,
        block_size=block_size,
        causal=causal,
    )
    order[..., kept:] = -1
    if not causal:
        order = np.minimum(order, 0)
    of_segments = None if segments is None else jnp.atleast_2d(segments)
    tokens = Tokens(jnp.atleast_2d(order), of_segments)
    blocks = layout.blocks_in(each, block_size)
    visited = np.asarray(pairs_of_the_ring(tokens, ring_size, blocks))
    np.testing.assert_array_equal(work.visited, visited.sum(1))
    hops = [
        [visited[r, (r - hop) % ring_size] for r in range(ring_size)] for hop in range(ring_size)
    ]
    assert work.slowest == np.sum(np.max(hops, axis=1))


@functools.partial(jax.jit, static_argnums=(1, 2))
def pairs_of_the_ring(tokens, ring_size, blocks):
    """Pairs visited, by [device, source of the keys]: `ring.blocks` itself."""

    def shard(r):  # [rows, T] to [blocks, rows, K]
        part = jax.tree.map(lambda x: jnp.split(x, ring_size, axis=1)[r], tokens)
        return jax.tree.map(lambda x: x[0], split_tokens(part, blocks, rows=2))

    each = jax.tree.map(lambda *x: jnp.stack(x), *map(shard, range(ring_size)))
    pairs = jax.vmap(jax.vmap(block_pairs, (None, 0)), (0, None))(each, each)
    return pairs.count.sum(-1)
