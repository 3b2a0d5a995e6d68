"""Where attention goes: a diagnostic."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ring.attention import attention
from ring.tokens import per_token


def attention_mass(q: Array, k: Array, groups: ArrayLike, number: int, **options: Any) -> Array:
    """How much of each query's attention goes to each group of keys, say each trajectory.

    It is attention to values that are 1 in the channel of their group and 0 elsewhere, so it is
    exact and needs as little memory, on any mesh.

    Args:
        q: Queries [B, Tq, H, D].
        k: Keys [B, Tk, Hkv, D].
        groups: Integers [Tk] or [B, Tk]: the group of each key, 0 … number − 1; others count in
            none.
        number: N, how many groups.
        **options: Those of `ring.attention`, but for `return_lse`.

    Returns:
        float32 [B, Tq, H, N]: sums over the last axis to 1, if all visible keys are in groups, or
        to 0 where a query sees no key.

    Raises:
        ValueError: As `ring.attention`, or `groups` has another shape or is not of integers.
    """
    batch, length, key_heads, width = k.shape
    member = per_token("groups", groups, batch, length)[..., None]
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    parts = []
    for first in range(0, number, width):
        one_hot = member == first + jnp.arange(width)
        shape = (batch, length, key_heads, width)
        values = jnp.broadcast_to(one_hot[:, :, None], shape).astype(jnp.float32)
        parts.append(attention(q, k, values, **options))
    return jnp.concatenate(parts, axis=-1)[..., :number]
