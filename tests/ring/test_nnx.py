"""Flax modules that attend around the ring, scanned over layers and rematerialised."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import ring


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.project = nnx.Linear(8, 24, rngs=rngs)

    @functools.partial(nnx.remat, static_argnums=(2,))
    def __call__(self, x, implementation):
        q, k, v = (part.reshape(*x.shape[:2], 2, 4) for part in jnp.split(self.project(x), 3, -1))
        attended = ring.attention(q, k, v, implementation=implementation, block_size=4)
        return x + attended.reshape(x.shape)


def test_scanned_and_rematerialised_modules_train_alike():
    @functools.partial(nnx.vmap, in_axes=0)
    def stack(rngs):
        return Layer(rngs)

    layers = stack(nnx.Rngs(0).split(3))
    x = jax.random.normal(jax.random.key(1), (2, 30, 8))

    def loss(layers, x, implementation):
        @functools.partial(nnx.scan, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(layer, x):
            return layer(x, implementation)

        return (forward(layers, x) ** 2).mean()

    expected = nnx.value_and_grad(loss)(layers, x, "dense")
    with jax.set_mesh(ring.make_mesh(data=2, ring=4)):
        train = nnx.jit(nnx.value_and_grad(loss), static_argnums=2)
        found = train(layers, x, "ring")
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, expected
    )
