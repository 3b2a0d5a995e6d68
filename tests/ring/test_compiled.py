"""What XLA is asked to do: which collectives, which blocks, how often."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ring
from ring.blocks import block_pairs, split_tokens
from ring.blockwise import Keys, _scores
from ring.ring import rotate
from ring.tokens import Tokens

COLLECTIVE = r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
SAVE = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")


def collectives(fn, *operands):
    """How many collectives of each kind the compiled function contains."""
    text = jax.jit(fn).lower(*operands).compile().as_text()
    return collections.Counter(re.findall(COLLECTIVE, text))


def executed(jaxpr, times=1):
    """How many arrays are sent, by dtype: those of `ppermute`, times the lengths of the loops."""
    total = collections.Counter()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute":
            total.update({str(x.aval.dtype): times for x in eqn.invars})
        inside = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for sub in jaxprs_in_params(eqn.params):
            total += executed(sub, inside)
    return total


def operands(mesh, batch=2, length=32, heads=2, width=4, dtype=jnp.float32):
    sharding = NamedSharding(mesh, P(("data", "fsdp"), "ring", "tensor"))
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        jax.device_put(jax.random.normal(key, (batch, length, heads, width), dtype), sharding)
        for key in keys
    ]


def loss(q, k, v, **options):
    return (ring.attention(q, k, v, **options) ** 2).sum()


def test_a_ring_sends_what_is_needed_once_and_gathers_nothing():
    """Keys and values as one array of their own dtype, orders as one of int32, R − 1 times."""
    mesh = ring.make_mesh(data=2, ring=4)
    q, k, v = operands(mesh, dtype=jnp.bfloat16)
    attend = functools.partial(ring.attention, implementation="ring", mesh=mesh, block_size=8)
    assert collectives(attend, q, k, v) == {"collective-permute": 2}  # in a loop of 3
    assert executed(jax.make_jaxpr(attend)(q, k, v).jaxpr) == {"bfloat16": 3, "int32": 3}

    def gradients(q, k, v, dout):
        return jax.vjp(attend, q, k, v)[1](dout)

    assert set(collectives(gradients, q, k, v, q)) == {"collective-permute"}
    # Twice around, and the gradients of keys and values in float32 all the way home.
    sent = executed(jax.make_jaxpr(gradients)(q, k, v, q).jaxpr)
    assert sent == {"bfloat16": 3 + 3, "int32": 3 + 3, "float32": 4}


def hops(size, block_size=8, length=64, backward=False, **options):
    """How many hops keys make, counted as they happen on each of the devices."""
    mesh, made = ring.make_mesh(ring=size), []
    q, k, v = operands(mesh, batch=1, length=length)

    def counted(tree, around, steps=1):
        if isinstance(tree, Keys) or isinstance(tree[0], Keys):
            jax.debug.callback(lambda: made.append(steps))
        return rotate(tree, around, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring.ring, "rotate", counted)
        attend = functools.partial(
            ring.attention, implementation="ring", mesh=mesh, block_size=block_size, **options
        )
        if backward:
            jax.block_until_ready(jax.jit(lambda *x: jax.vjp(attend, *x)[1](q))(q, k, v))
        else:
            jax.block_until_ready(jax.jit(attend)(q, k, v))
        jax.effects_barrier()
    assert len(made) % size == 0
    return len(made) // size


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        (np.zeros(64), 7),  # one segment goes all the way
        (np.arange(64) // 8, 0),  # a segment a device
        (np.arange(64) // 16, 1),
        ((np.arange(64) + 4) // 8, 1),  # each straddles two devices
        ((np.arange(64) + 4) // 16, 2),  # each on three
        (np.where(np.arange(64) < 40, 0, 1), 4),  # as far as the longest needs
    ],
)
def test_keys_travel_no_further_than_segments_reach(segments, expected):
    segments = segments.astype(np.int32)
    assert hops(8, segments=segments) == expected
    assert hops(8, segments=segments, backward=True) == 2 * expected  # there, and there again


@pytest.mark.parametrize("segments", [None, np.arange(64) // 20])
def test_the_pairs_computed_are_those_of_work(segments):
    """Counted as they are computed, on all devices of a ring with a zigzag layout."""
    mesh, made = ring.make_mesh(ring=4), []
    q, k, v = operands(mesh, batch=1, length=64, heads=1)
    permutation = ring.layout.zigzag(64, 4)
    options = {"order": permutation}
    if segments is not None:
        options["segments"] = segments[permutation]

    def counted(*arguments):
        jax.debug.callback(lambda: made.append(1))
        return _scores(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring.blockwise, "_scores", counted)
        attend = functools.partial(
            ring.attention, implementation="ring", mesh=mesh, block_size=4, **options
        )
        jax.block_until_ready(jax.jit(attend)(q, k, v))
        jax.effects_barrier()
    work = ring.layout.work(**options, ring_size=4, block_size=4)
    assert len(made) == work.visited.sum() < work.pairs


def test_without_segments_keys_go_all_the_way():
    assert hops(4) == 3


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "ring"])
def test_without_a_ring_nothing_is_sent(implementation):
    mesh = ring.make_mesh(data=2, fsdp=2, tensor=2)
    q, k, v = operands(mesh, batch=4)

    def gradients(q, k, v, dout):
        attend = functools.partial(ring.attention, implementation=implementation, mesh=mesh)
        return jax.vjp(attend, q, k, v)[1](dout)

    assert not collectives(gradients, q, k, v, q)


def test_the_policy_of_named_results_saves_the_second_forward_ring():
    mesh = ring.make_mesh(ring=4)
    q, k, v = operands(mesh)
    layer = functools.partial(loss, implementation="ring", mesh=mesh, block_size=8)

    def permutes(fn):
        gradients = jax.value_and_grad(fn, argnums=(0, 1, 2))
        return executed(jax.make_jaxpr(gradients)(q, k, v).jaxpr)["int32"]  # sent with keys

    forward, backward = 3, 3
    assert permutes(layer) == forward + backward
    assert permutes(jax.checkpoint(layer, policy=SAVE)) == forward + backward
    assert permutes(jax.checkpoint(layer)) == 2 * forward + backward


def test_composes_with_scanned_rematerialised_layers_on_the_context_mesh():
    keys = jax.random.split(jax.random.key(1), 2)
    weights = jax.random.normal(keys[0], (3, 4, 8, 8)) / 3  # three layers of q, k, v, out
    x = jax.random.normal(keys[1], (2, 30, 8))

    def model(weights, x, implementation):
        @functools.partial(jax.checkpoint, policy=SAVE)
        def layer(x, w):
            q, k, v = ((x @ w[n]).reshape(2, 30, 2, 4) for n in range(3))
            attended = ring.attention(q, k, v, implementation=implementation, block_size=4)
            return x + attended.reshape(x.shape) @ w[3], None

        return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()

    expected = jax.value_and_grad(model)(weights, x, "dense")
    with jax.set_mesh(ring.make_mesh(data=2, ring=2, tensor=2)):
        train = jax.jit(jax.value_and_grad(model), static_argnums=2)
        actual = train(weights, x, "ring")
        traced = jax.make_jaxpr(jax.grad(model), static_argnums=2)(weights, x, "ring")
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), actual, expected
    )
    # A ring of 2, a layer: 1 hop forward, 1 backward, 2 that gradients make; no forward again.
    assert executed(traced.jaxpr)["float32"] == 3 * (1 + 1 + 2)


def pairs_of(order, segment=None, block=4):
    as_tokens = Tokens(jnp.asarray(order)[None], None if segment is None else segment[None])
    blocked = split_tokens(as_tokens, -(-len(order) // block))
    blocked = jax.tree.map(lambda x: x[0], blocked)
    return block_pairs(blocked, blocked)


def test_causal_attention_visits_the_lower_triangle():
    pairs = pairs_of(np.arange(40))
    np.testing.assert_array_equal(pairs.count, np.arange(1, 11))


def test_segments_are_visited_alone():
    segment = np.repeat(np.arange(5, dtype=np.int32), 8)
    pairs = pairs_of(np.arange(40), segment)
    np.testing.assert_array_equal(pairs.count, np.tile([1, 2], 5))


def test_padding_is_not_visited():
    order = np.where(np.arange(40) < 24, np.arange(40), -1)
    np.testing.assert_array_equal(pairs_of(order).count, [1, 2, 3, 4, 5, 6, 0, 0, 0, 0])


@pytest.mark.parametrize("size", [1, 4])
def test_blocks_that_no_query_sees_are_never_touched(size, oracle):
    """Keys of the future are NaN: one product with them would spoil everything."""
    mesh = ring.make_mesh(ring=size)
    q, k, v = (np.array(x) for x in operands(mesh, length=64))
    q_order, k_order = np.arange(32, dtype=np.int32), np.arange(64, dtype=np.int32)
    q, poisoned = q[:, :32], np.arange(64) >= 32
    k[:, poisoned] = v[:, poisoned] = np.nan
    attend = functools.partial(
        ring.attention, implementation="ring", order=(q_order, k_order), mesh=mesh, block_size=8
    )
    out, vjp = jax.vjp(jax.jit(attend), q, k, v)
    dq, dk, dv = vjp(jnp.ones_like(out))
    expected, _, *gradients = oracle(q, k[:, :32], v[:, :32], np.ones(q.shape))
    for x, y in zip((out, dq, dk[:, :32], dv[:, :32]), (expected, *gradients), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(dk[:, 32:], 0)
    np.testing.assert_array_equal(dv[:, 32:], 0)
