"""One process tests every mesh: eight simulated CPU devices, no display, no network."""

import os

os.environ.setdefault("MUJOCO_GL", "disabled")  # before dm_control is imported anywhere

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
