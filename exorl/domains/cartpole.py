"""Cartpole: a pole on a cart that only the cart can move.

`physics [..., 4]` is the cart's position (m), the pole's angle from upright (rad), and their
velocities.
"""

import numpy as np

from exorl.domains import tolerance

# What the sparse rewards ask for: distance from the centre (meters), cosine of the pole's angle.
CENTERED = 0.25
UPRIGHT = 0.995


def cart_position(physics: np.ndarray) -> np.ndarray:
    """Position of the cart on its rail (meters) `[...]`."""
    return physics[..., 0]


def pole_angle_cosine(physics: np.ndarray) -> np.ndarray:
    """1 when the pole stands upright, -1 when it hangs, `[...]`."""
    return np.cos(physics[..., 1])


def angular_vel(physics: np.ndarray) -> np.ndarray:
    """Angular velocity of the pole (radians/second) `[...]`."""
    return physics[..., 3]


def observation(physics: np.ndarray) -> np.ndarray:
    """Cart position, cosine and sine of the pole's angle, both velocities, `[..., 5]`."""
    position, angle = physics[..., :1], physics[..., 1:2]
    return np.concatenate([position, np.cos(angle), np.sin(angle), physics[..., 2:]], axis=-1)


def reward(goal: str, physics: np.ndarray, control: np.ndarray) -> np.ndarray:
    """Upright, times soft demands for a centred cart, little force and a slow pole, `[...]`.

    The sparse goals pay 1 for an upright pole on a centred cart, else 0. `swingup` starts with
    the pole hanging, `balance` with it upright.
    """
    if goal.endswith("_sparse"):
        centered = np.abs(cart_position(physics)) <= CENTERED
        return (centered & (pole_angle_cosine(physics) >= UPRIGHT)).astype(np.float64)
    upright = (pole_angle_cosine(physics) + 1) / 2
    centered = (1 + tolerance.near_zero(cart_position(physics), margin=2)) / 2
    small_control = (4 + tolerance.near_zero_quadratic(control[..., 0], margin=1)) / 5
    small_velocity = (1 + tolerance.near_zero(angular_vel(physics), margin=5)) / 2
    return upright * small_control * small_velocity * centered
