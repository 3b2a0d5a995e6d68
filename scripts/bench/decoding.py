"""The decoding of the Ring Attention paper, where keys and values travel for every token.

Kept as the reference that `ring.decode_attention`, whose cache stays where it is, is measured
against (Liu, Zaharia & Abbeel 2023, arXiv 2310.01889, section on inference; LWM's code does so).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import ring


def rotating(q: Array, q_order: Array, cache: ring.KV, mesh: Mesh) -> Array:
    """What `ring.decode_attention(q, q_order, [cache], mesh=mesh)` returns, [B, Tq, H, D].

    Every device sees every shard of the cache pass by: R hops of all of it, the last of them home,
    each a message of 2 · Hkv · C / R · D elements, against two small sums.
    """
    size = mesh.shape["ring"]
    to = [(i, (i + 1) % size) for i in range(size)]

    def shard(q: Array, k: Array, v: Array, order: Array) -> Array:
        groups = q.shape[2] // v.shape[1]

        def hop(_: Array, carry: tuple) -> tuple:
            (k, v, order), (highest, total, values) = carry
            following = lax.ppermute((k, v, order), "ring", to)
            wide = (jnp.repeat(x, groups, axis=1) for x in (k, v))
            scores = jnp.einsum("bqhd,bhdk->bhqk", q, next(wide)) * q.shape[-1] ** -0.5
            seen = (order >= 0) & (order <= q_order[:, None])
            scores = jnp.where(seen, scores, -jnp.inf)
            rising = jnp.maximum(highest, scores.max(-1))
            weights, shrink = jnp.exp(scores - rising[..., None]), jnp.exp(highest - rising)
            added = jnp.einsum("bhqk,bhkd->bhqd", weights, next(wide))
            total = total * shrink + weights.sum(-1)
            return following, (rising, total, values * shrink[..., None] + added)

        rows = q.swapaxes(1, 2)
        start = jnp.full_like(rows[..., 0], -1e30), jnp.zeros_like(rows[..., 0]), 0 * rows
        start = lax.pcast(start, "ring", to="varying")
        _, (_, total, values) = lax.fori_loop(0, size, hop, ((k, v, order), start))
        out = values / jnp.where(total > 0, total, 1)[..., None]
        # All devices have the same; to say so takes a sum that the paper's program does not need.
        return lax.psum(out, "ring").swapaxes(1, 2) / size

    keys, values = P(None, None, None, "ring"), P(None, None, "ring")
    return jax.shard_map(shard, mesh=mesh, in_specs=(P(), keys, values, P("ring")), out_specs=P())(
        q, cache.k, cache.v, cache.order
    )
