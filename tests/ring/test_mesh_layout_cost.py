"""Meshes, layouts and cost formulas."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

import ring
from ring import cost, layout


def test_a_mesh_has_four_auto_axes():
    mesh = ring.make_mesh(data=2, ring=4)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "ring": 4, "tensor": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert ring.make_mesh(ring=2, devices=jax.devices()[3:5]).devices.ravel()[0].id == 3


def test_meshes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"needs 16 devices, 8 are.*device_count=16"):
        ring.make_mesh(data=2, ring=8)
    with pytest.raises(ValueError, match="needs 2 devices, 3 were given"):
        ring.make_mesh(ring=2, devices=jax.devices()[:3])
    with pytest.raises(ValueError, match="tensor=0"):
        ring.make_mesh(tensor=0)


@given(st.integers(1, 20), st.integers(1, 8))
def test_contiguous_is_a_permutation_that_inverse_undoes(per_device, ring_size):
    permutation = layout.contiguous(per_device * ring_size, ring_size)
    np.testing.assert_array_equal(np.sort(permutation), np.arange(per_device * ring_size))
    np.testing.assert_array_equal(permutation[layout.inverse(permutation)], np.sort(permutation))


@given(st.permutations(range(12)))
def test_inverse_undoes_any_permutation(permutation):
    permutation = np.array(permutation)
    x = np.arange(100, 112)
    np.testing.assert_array_equal(x[permutation][layout.inverse(permutation)], x)


def test_contiguous_refuses_what_does_not_divide():
    with pytest.raises(
        ValueError, match="length 10 does not divide over a ring of 4; pad it to 12"
    ):
        layout.contiguous(10, 4)


def test_flops_of_the_papers_formula():
    width, length = 128, 1000
    per_layer = 24 * length * width**2 + 4 * length**2 * width
    assert cost.forward_flops(3, width, length, causal=False) == 3 * per_layer
    assert cost.training_flops(3, width, length, causal=False) == 9 * per_layer
    saved = cost.forward_flops(1, width, length, causal=False) - cost.forward_flops(
        1, width, length
    )
    assert saved == 2 * length**2 * width


def test_attention_flops_match_xla():
    """Full dense attention: XLA counts the same products, plus a little softmax."""
    q = np.zeros((2, 256, 4, 32), np.float32)
    compiled = jax.jit(lambda q: ring.attention(q, q, q, causal=False)).lower(q).compile()
    counted = compiled.cost_analysis()["flops"]
    expected = cost.attention_flops(2, 256, 4, 32, causal=False)
    assert expected <= counted <= 1.2 * expected
    assert cost.attention_flops(2, 256, 4, 32) == expected / 2
    assert cost.attention_flops(2, 256, 4, 32, backward=True) == 3.5 * expected / 2


def test_minimum_block_of_an_a100():
    """312 TFLOP/s over NVLink at 300 GB/s: the paper's table gives 1.0 thousand tokens."""
    assert cost.minimum_block(312e12, 300e9) == pytest.approx(1.04e3)


def test_activation_bytes_of_the_four_modes():
    sizes = {"batch": 2, "length": 4096, "width": 512, "heads": 8}
    assert cost.activation_bytes("plain", **sizes) == 2 * 2 * 8 * 4096**2
    assert cost.activation_bytes("memory_efficient", **sizes) == 8 * 2 * 4096 * 512
    assert cost.activation_bytes("bpt", **sizes) == 2 * 2 * 4096 * 512
    assert cost.activation_bytes("ring", **sizes, ring_size=8) == 6 * 2 * 512 * 512
    with pytest.raises(ValueError, match="not one of plain"):
        cost.activation_bytes("dense", **sizes)  # pyright: ignore[reportArgumentType]
