"""Every implementation against the float64 oracle: values, gradients, edge cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ring
from ring import blocks


def draw(seed, batch, q_length, k_length, heads, key_heads, width, std=1.0):
    rng = np.random.default_rng(seed)

    def normal(length, heads):
        return rng.normal(size=(batch, length, heads, width)).astype(np.float32)

    q, dout = std * normal(q_length, heads), normal(q_length, heads)
    return q, normal(k_length, key_heads), normal(k_length, key_heads), dout


def value_and_gradients(q, k, v, dout, **options):
    """out, dq, dk, dv, jitted."""

    @jax.jit
    def both(q, k, v, dout):
        out, vjp = jax.vjp(functools.partial(ring.attention, **options), q, k, v)
        return out, *vjp(dout)

    return both(q, k, v, dout)


def check(actual, expected, atol=1e-5):
    for name, x, y in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol, err_msg=name)


def shuffled(length, seed=0):
    return np.random.default_rng(seed).permutation(length).astype(np.int32)


def padded(length, batch):
    """Row b ends with 3 b paddings; the first row has one in the middle."""
    order = np.tile(np.arange(length, dtype=np.int32), (batch, 1))
    for b in range(batch):
        order[b, length - 3 * b :] = -1
    order[0, length // 2] = -1
    return order


def packed(length, batch, size=13):
    """Runs of `size` tokens a segment, starting elsewhere in every batch row."""
    return (np.arange(length) + 5 * np.arange(batch)[:, None]).astype(np.int32) // size


# mesh, shape (B, Tq, Tk, H, Hkv, D), options
CASES = {
    "one device": ({}, (2, 40, 40, 2, 2, 8), {}),
    "ring 2, shuffled": ({"ring": 2}, (1, 33, 33, 2, 1, 4), {"order": shuffled(33)}),
    "ring 4, full, unequal": ({"ring": 4}, (1, 21, 50, 2, 2, 8), {"causal": False, "scale": 0.8}),
    "ring 8, packed": ({"ring": 8}, (2, 70, 70, 2, 1, 8), {"segments": packed(70, 2)}),
    "ring 4, a segment a device": (
        {"ring": 4},
        (1, 64, 64, 2, 2, 4),
        {"segments": (np.arange(64) // 16).astype(np.int32)},
    ),
    "ring 8, short segments": (
        {"ring": 8},
        (2, 64, 64, 2, 1, 4),
        {"segments": packed(64, 2, size=6)},
    ),
    "data 2, ring 4, padded": (
        {"data": 2, "ring": 4},
        (4, 61, 61, 2, 2, 8),
        {"order": padded(61, 4), "segments": packed(61, 1)[0]},
    ),
    "fsdp 2, ring 2, tensor 2, grouped": (
        {"fsdp": 2, "ring": 2, "tensor": 2},
        (2, 64, 64, 8, 4, 4),
        {},
    ),
    "ring 4, shuffled, two orders": (
        {"ring": 4},
        (1, 19, 37, 3, 1, 8),
        {"order": (shuffled(37)[:19], shuffled(37, 1))},
    ),
}
# Blockwise is a ring of one device, so fewer cases cover it and dense.
COVERED = [(case, "ring") for case in CASES] + [
    (case, implementation)
    for case in ("one device", "data 2, ring 4, padded")
    for implementation in ("dense", "blockwise")
]


@pytest.mark.parametrize(("case", "implementation"), COVERED)
def test_matches_the_oracle(case, implementation, oracle):
    mesh, shape, options = CASES[case]
    operands = draw(0, *shape)
    actual = value_and_gradients(
        *operands,
        implementation=implementation,
        mesh=ring.make_mesh(**mesh),
        block_size=8,
        **options,
    )
    out, _, *gradients = oracle(*operands, **options)
    check(actual, (out, *gradients))


@pytest.mark.parametrize("sides", ["both", "query", "key", "neither"])
@pytest.mark.parametrize("mesh", [{}, {"ring": 2}])
def test_blocks_too_large_to_be_worked_on_together(mesh, sides, oracle):
    """Each head and batch row is a group of its own; tokens that all rows share are kept once."""
    operands = draw(12, 3, 520, 520, 4, 2, 4)
    local = 520 // mesh.get("ring", 1)
    cut = blocks.plan(*(x[:, :local] for x in operands[:2]), 128)
    assert (cut.rows, cut.heads) == (1, 1) and cut.key_blocks > 1
    order, segments = padded(520, 3), packed(520, 3, size=200)
    shared = order[0], segments[0]

    def each(n):
        of_rows = (order, segments)[n]
        return tuple(of_rows if sides in ("both", side) else shared[n] for side in ("query", "key"))

    options = {"order": each(0), "segments": each(1)}
    actual = value_and_gradients(
        *operands, implementation="ring", mesh=ring.make_mesh(**mesh), block_size=128, **options
    )
    out, _, *gradients = oracle(*operands, **options)
    check(actual, (out, *gradients))


@pytest.mark.parametrize("implementation", ["dense", "ring"])
def test_large_logits(implementation, oracle):
    operands = draw(1, 1, 48, 48, 2, 2, 8, std=10.0)
    mesh = ring.make_mesh(ring=2)
    actual = value_and_gradients(
        *operands, implementation=implementation, mesh=mesh, block_size=8, scale=8**-0.5
    )
    out, _, *gradients = oracle(*operands)
    check(actual, (out, *gradients), atol=3e-5)


@pytest.mark.parametrize("implementation", ["dense", "ring"])
def test_rows_that_see_nothing_are_zero_and_pass_no_gradient(implementation, oracle):
    operands = draw(2, 2, 24, 24, 2, 2, 4)
    order = np.stack([np.full(24, -1), np.arange(24)]).astype(np.int32)
    order[1, 5] = -1
    options = {"implementation": implementation, "order": order, "block_size": 8}
    mesh = ring.make_mesh(ring=2)
    out, *gradients = value_and_gradients(*operands, mesh=mesh, **options)
    expected, _, *expected_gradients = oracle(*operands, order=order)
    check((out, *gradients), (expected, *expected_gradients))
    for x in (out, *gradients):
        np.testing.assert_array_equal(x[0], 0)
        np.testing.assert_array_equal(x[1, 5], 0)


@pytest.mark.parametrize("implementation", ["dense", "ring"])
def test_lse_and_its_gradient(implementation, oracle):
    q, k, v, dout = draw(3, 1, 30, 30, 2, 1, 4)
    dlse = np.random.default_rng(4).normal(size=(1, 2, 30)).astype(np.float32)
    order = np.arange(30, dtype=np.int32)
    order[-1] = -1
    attend = functools.partial(
        ring.attention,
        implementation=implementation,
        order=order,
        mesh=ring.make_mesh(ring=2),
        block_size=8,
        return_lse=True,
    )

    @jax.jit
    def both(q, k, v):
        (out, lse), vjp = jax.vjp(attend, q, k, v)
        return out, lse, *vjp((dout, dlse))

    out, lse, *gradients = both(q, k, v)
    expected, expected_lse, *expected_gradients = oracle(q, k, v, dout, dlse, order=order)
    check((out, *gradients), (expected, *expected_gradients))
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert np.isneginf(lse[..., -1]).all()

    def merged(q, k, v):  # with another part in which the last row sees nothing either
        out, lse = attend(q, k, v)
        return out, jnp.where(jnp.isfinite(lse), lse, lse**2)

    # The square of −inf has no gradient: NaN, for a row that saw no key and has nothing to pass on.
    _, dk, _ = jax.vjp(merged, q, k, v)[1]((dout, dlse))
    np.testing.assert_allclose(dk, gradients[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        ("dense", {}),
        ("blockwise", {"causal": False}),
        ("ring", {}),
        ("ring", {"segments": packed(40, 1)[0], "scale": 0.3}),
        ("ring", {"order": shuffled(40), "causal": False}),
    ],
)
def test_value_is_bitwise_the_same_under_differentiation(implementation, options):
    q, k, v, dout = draw(5, 2, 40, 40, 2, 1, 8)
    options = options | {
        "implementation": implementation,
        "mesh": ring.make_mesh(ring=2),
        "block_size": 8,
    }
    plain = jax.jit(functools.partial(ring.attention, **options))(q, k, v)
    np.testing.assert_array_equal(plain, value_and_gradients(q, k, v, dout, **options)[0])


@pytest.mark.parametrize("implementation", ["dense", "ring"])
def test_bfloat16_in_bfloat16_out(implementation, oracle):
    operands = [jnp.asarray(x, jnp.bfloat16) for x in draw(6, 1, 64, 64, 2, 1, 8)]
    actual = value_and_gradients(
        *operands, implementation=implementation, mesh=ring.make_mesh(ring=4), block_size=8
    )
    out, _, *gradients = oracle(*operands)
    for x, y in zip(actual, (out, *gradients), strict=True):
        assert x.dtype == jnp.bfloat16
        # A unit of bfloat16 in the last place is 1/128 of the value.
        np.testing.assert_allclose(x.astype(jnp.float32), y, rtol=0.02, atol=0.03)


def test_bfloat16_is_rounded_once_and_not_with_every_block(oracle):
    """Beside the exact result in bfloat16: after 64 blocks of keys, half of them from elsewhere."""
    operands = [jnp.asarray(x, jnp.bfloat16) for x in draw(6, 1, 512, 512, 1, 1, 16)]
    mesh = ring.make_mesh(ring=2)
    actual = value_and_gradients(*operands, implementation="ring", mesh=mesh, block_size=8)
    out, _, *gradients = oracle(*operands)
    for x, y in zip(actual, (out, *gradients), strict=True):
        rounded = np.asarray(jnp.asarray(y, jnp.bfloat16), np.float64)
        error = np.sqrt(((np.asarray(x, np.float64) - y) ** 2).mean())
        assert error <= 2 * np.sqrt(((rounded - y) ** 2).mean())


def test_vmap_over_an_extra_axis(oracle):
    one, other = draw(7, 1, 24, 24, 2, 1, 4), draw(8, 1, 24, 24, 2, 1, 4)
    operands = [np.stack(pair) for pair in zip(one, other, strict=True)]
    options = {"implementation": "ring", "mesh": ring.make_mesh(ring=2), "block_size": 8}

    def both(q, k, v, dout):
        out, vjp = jax.vjp(functools.partial(ring.attention, **options), q, k, v)
        return out, *vjp(dout)

    actual = jax.jit(jax.vmap(both))(*operands)
    for n in range(2):
        out, _, *gradients = oracle(*(x[n] for x in operands))
        check([x[n] for x in actual], (out, *gradients))


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "ring": 4}])
def test_mass_is_the_share_of_each_group(mesh):
    q, k, _, _ = draw(9, 2, 36, 36, 2, 1, 4)
    groups = packed(36, 2, size=7)  # six groups, more than a head has channels
    order = np.arange(36, dtype=np.int32)
    order[3] = -1
    options = {"mesh": ring.make_mesh(**mesh), "block_size": 8, "order": order}
    mass = jax.jit(
        lambda q, k: ring.attention_mass(q, k, groups, 7, implementation="ring", **options)
    )(q, k)
    assert mass.shape == (2, 36, 2, 7) and mass.dtype == jnp.float32
    np.testing.assert_allclose(
        mass.sum(-1), np.broadcast_to(order[:, None] >= 0, (2, 36, 2)), atol=1e-6
    )
    scores = np.einsum("bqhd,bkd->bhqk", q.astype(float), k[:, :, 0]) / 2
    seen = (order >= 0) & (order <= order[:, None])
    weights = np.where(seen, np.exp(scores), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    one_hot = groups[..., None] == np.arange(7)
    np.testing.assert_allclose(mass, np.einsum("bhqk,bkn->bqhn", weights, one_hot), atol=1e-6)


@pytest.mark.parametrize("size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4)), 8])
@pytest.mark.parametrize(("std", "out_error", "gradient_error"), [(1.0, 1e-6, 5e-6), (10.0, 4, 4)])
def test_error_against_float64(size, std, out_error, gradient_error, oracle):
    """Absolute for logits of unit variance; for those of std 10, times dense float32's own."""
    operands = draw(10, 1, 256, 256, 2, 1, 64, std=std)
    out, _, *gradients = oracle(*operands)

    def errors(implementation):
        mesh = ring.make_mesh(ring=size)
        options = {"implementation": implementation, "mesh": mesh, "block_size": 32}
        actual = value_and_gradients(*operands, **options)
        return [np.abs(x - y).max() for x, y in zip(actual, (out, *gradients), strict=True)]

    found = errors("ring")
    if std > 1:
        found = np.array(found) / errors("dense")
    assert found[0] <= out_error and max(found[1:]) <= gradient_error, found


def attention_cases(meshes):
    return st.fixed_dictionaries(
        {
            "mesh": st.sampled_from(meshes),
            "batch": st.integers(1, 2),
            "q_length": st.integers(1, 40),
            "k_length": st.integers(1, 40),
            "heads": st.sampled_from([(1, 1), (2, 1), (4, 2)]),
            "block_size": st.integers(1, 20),
            "causal": st.booleans(),
            "segment_size": st.sampled_from([None, 1, 7, 100]),
            "padding": st.sampled_from([0.0, 0.3]),
            "seed": st.integers(0, 2**16),
        }
    )


def agrees_with_the_oracle(oracle, implementation, case):
    rng = np.random.default_rng(case["seed"])
    lengths = case["q_length"], case["k_length"]
    batch = case["batch"] * case["mesh"].get("data", 1) * case["mesh"].get("fsdp", 1)
    operands = draw(case["seed"], batch, *lengths, *case["heads"], 4)
    total = max(lengths)
    order = np.stack([rng.permutation(total) for _ in range(batch)]).astype(np.int32)
    order[rng.random(order.shape) < case["padding"]] = -1
    options = {"causal": case["causal"], "order": tuple(order[:, :n] for n in lengths)}
    if case["segment_size"] is not None:
        segment = order // case["segment_size"]
        options["segments"] = tuple(segment[:, :n] for n in lengths)
    actual = value_and_gradients(
        *operands,
        implementation=implementation,
        mesh=ring.make_mesh(**case["mesh"]),
        block_size=case["block_size"],
        **options,
    )
    out, _, *gradients = oracle(*operands, **options)
    check(actual, (out, *gradients))


@given(case=attention_cases([{}]))
@settings(max_examples=4, deadline=None, derandomize=True)
def test_any_shape_blockwise(oracle, case):
    agrees_with_the_oracle(oracle, "blockwise", case)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["dense", "ring"])
@given(
    case=attention_cases(
        [{"ring": 2}, {"ring": 3}, {"data": 2, "ring": 4}, {"ring": 8}, {"fsdp": 2, "ring": 2}]
    )
)
@settings(max_examples=15, deadline=None, derandomize=True)
def test_any_shape_on_any_mesh(oracle, implementation, case):
    agrees_with_the_oracle(oracle, implementation, case)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": "flash"}, "not one of dense, blockwise, ring"),
        ({"order": tuple(range(8))}, "order is a tuple of 8; expected an array, or a pair"),
        ({"scale": float("nan")}, "scale nan must be positive"),
        ({"block_size": 0}, "block_size 0 must be positive"),
        ({"order": np.arange(9)}, r"order of the query has shape \(9,\), expected \(8,\)"),
        ({"order": np.arange(8.0)}, "expected int32"),
        ({"segments": np.zeros((3, 8), int)}, "segments of the query has shape"),
        ({"mesh": {"data": 4}}, "batch 2 does not divide over mesh axis data of size 4; 4"),
        ({"mesh": {"tensor": 4}}, "query heads 2 does not divide over mesh axis tensor of size 4"),
        ({"mesh": {"tensor": 2}}, "key heads 1 does not divide over mesh axis tensor of size 2"),
    ],
)
def test_refuses_with_a_way_out(change, message):
    q, k, v, _ = draw(0, 2, 8, 8, 2, 1, 4)
    if "mesh" in change:
        change = {"mesh": ring.make_mesh(**change["mesh"])}
    with pytest.raises(ValueError, match=message):
        ring.attention(q, k, v, **change)


def test_refuses_operands_that_do_not_belong_together():
    q, k, v, _ = draw(0, 2, 8, 8, 4, 3, 4)
    with pytest.raises(ValueError, match="4 query heads do not share 3 key heads"):
        ring.attention(q, k, v)
    with pytest.raises(ValueError, match="share one float dtype"):
        ring.attention(q, k[:, :, :1], v[:, :, :1].astype(np.float16))
    with pytest.raises(ValueError, match="batch and head dimension"):
        ring.attention(q, k[:1, :, :1], v[:1, :, :1])
    with pytest.raises(ValueError, match=r"at least one query and one key.*k \(2, 0, 1, 4\)"):
        ring.attention(q, k[:, :0, :1], v[:, :0, :1])
    with pytest.raises(ValueError, match="no default order"):
        ring.attention(q, k[:, :7, :1], v[:, :7, :1])
