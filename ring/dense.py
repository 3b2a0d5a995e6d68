"""Attention as the textbook writes it: every score at once, differentiated by JAX.

The reference for the other two, and the fastest at short lengths; memory grows with Tq · Tk.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from ring.blockwise import FLOOR
from ring.tokens import Tokens, visible


def dense(
    q: Array, k: Array, v: Array, query: Tokens, key: Tokens, scale: float
) -> tuple[Array, Array]:
    """Attends q [B, Tq, H, D] to k, v [B, Tk, Hkv, D]: output like q, lse [B, H, Tq] float32."""
    batch, length, heads, width = q.shape
    shared = k.shape[2]  # query heads h·G … h·G+G−1 share key head h
    q = q.reshape(batch, length, shared, heads // shared, width)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(visible(query, key)[:, None, None], scores, -jnp.inf)
    highest = lax.stop_gradient(jnp.maximum(scores.max(-1), FLOOR))
    weights = jnp.exp(scores - highest[..., None])
    total = weights.sum(-1)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = jnp.einsum(
        "bhgqk,bkhd->bhgqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    out = (out / total[..., None]).astype(q.dtype)
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, width)
    lse = jnp.where(empty, -jnp.inf, highest + jnp.log(total)).reshape(batch, heads, length)
    return checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
