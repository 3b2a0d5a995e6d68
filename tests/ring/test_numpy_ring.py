"""The ring written out in NumPy: right by the dense oracle, and an oracle for the real ring."""

import functools

import jax
import numpy as np
import pytest

import ring
from tests.ring.numpy_ring import ring_attention

NAMES = ("out", "lse", "dq", "dk", "dv")


def draw(seed, q_length, k_length, batch=2, heads=4, key_heads=2, width=4):
    """q, k, v, dout, dlse."""
    rng = np.random.default_rng(seed)
    shapes = [(q_length, heads), (k_length, key_heads), (k_length, key_heads), (q_length, heads)]
    q, k, v, dout = (rng.normal(size=(batch, length, n, width)) for length, n in shapes)
    return q, k, v, dout, rng.normal(size=(batch, heads, q_length))


def shuffled_with_padding(length, batch=2):
    rng = np.random.default_rng(length)
    order = np.stack([rng.permutation(length) for _ in range(batch)])
    order[rng.random(order.shape) < 0.2] = -1
    return order.astype(np.int32)


CASES = {
    "causal": (30, 30, {}),
    "full, unequal": (11, 30, {"causal": False}),
    "shuffled, padded, packed": (
        30,
        30,
        {"order": shuffled_with_padding(30), "segments": np.arange(30) // 7},
    ),
    "two orders": (17, 30, {"order": (np.arange(17) * 2, shuffled_with_padding(30)[0])}),
}


@pytest.mark.parametrize("ring_size", [1, 2, 5])
@pytest.mark.parametrize("case", CASES)
def test_any_ring_is_dense_attention(case, ring_size, oracle):
    q_length, k_length, options = CASES[case]
    operands = draw(0, q_length, k_length)
    actual = ring_attention(*operands, ring_size=ring_size, **options)
    for name, x, y in zip(NAMES, actual, oracle(*operands, **options), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12, err_msg=name)


def test_large_scores_and_queries_that_see_nothing(oracle):
    q, *rest = draw(1, 12, 12)
    order = np.array([-1, *range(11)])
    actual = ring_attention(100 * q, *rest, ring_size=4, order=order)
    for name, x, y in zip(NAMES, actual, oracle(100 * q, *rest, order=order), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9, err_msg=name)
    assert (actual[0][:, 0] == 0).all() and np.isneginf(actual[1][:, :, 0]).all()


def test_the_ring_of_a_mesh_is_this_ring():
    """A zigzag layout on a ring of 4 devices, hop by hop the same blocks of keys."""
    order = ring.layout.zigzag(48, 4).astype(np.int32)
    segments = order // 20
    q, k, v, dout, dlse = (x.astype(np.float32) for x in draw(2, 48, 48))
    attend = functools.partial(
        ring.attention,
        implementation="ring",
        order=order,
        segments=segments,
        mesh=ring.make_mesh(ring=4),
        block_size=4,
        return_lse=True,
    )

    @jax.jit
    def both(q, k, v):
        (out, lse), vjp = jax.vjp(attend, q, k, v)
        return out, lse, *vjp((dout, dlse))

    expected = ring_attention(q, k, v, dout, dlse, ring_size=4, order=order, segments=segments)
    for name, x, y in zip(NAMES, both(q, k, v), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=name)
