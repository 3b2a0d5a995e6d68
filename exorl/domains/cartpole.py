"""Cartpole: a pole on a cart that only the cart can move.

`physics [..., 4]` is the cart's position (m), the pole's angle from upright (rad), and their
velocities.
"""

from typing import Any, NamedTuple

import numpy as np

from exorl.domains import tolerance
from exorl.domains.states import Meter, MjData, MjModel, States

# What the sparse rewards ask for: distance from the centre (meters), cosine of the pole's angle.
CENTERED = 0.25
UPRIGHT = 0.995


class ClosedForm(States):
    """What rewards are made of, as closed forms, `[...]` each."""

    @property
    def cart_position(self) -> np.ndarray:
        """Position of the cart on its rail (meters)."""
        return self.physics[..., 0]

    @property
    def pole_angle_cosine(self) -> np.ndarray:
        """1 when the pole stands upright, -1 when it hangs."""
        return np.cos(self.physics[..., 1])

    @property
    def angular_vel(self) -> np.ndarray:
        """Angular velocity of the pole (radians/second)."""
        return self.physics[..., 3]


class Measured(NamedTuple):
    """The same as MuJoCo computes it."""

    cart_position: np.ndarray
    pole_angle_cosine: np.ndarray
    angular_vel: np.ndarray


def meter(mujoco: Any, model: MjModel) -> Meter:
    """Reads `Measured` off a state that was just set."""
    pole = model.body("pole_1").id

    def measure(data: MjData) -> tuple[float, ...]:
        mujoco.mj_kinematics(model, data)
        return data.qpos[0], data.xmat[pole, 8], data.qvel[1]

    return measure


def observation(physics: np.ndarray) -> np.ndarray:
    """Cart position, cosine and sine of the pole's angle, both velocities, `[..., 5]`."""
    position, angle = physics[..., :1], physics[..., 1:2]
    return np.concatenate([position, np.cos(angle), np.sin(angle), physics[..., 2:]], axis=-1)


def reward(goal: str, state: ClosedForm | Measured, control: np.ndarray) -> np.ndarray:
    """Upright, times soft demands for a centred cart, little force and a slow pole, `[...]`.

    The sparse goals pay 1 for an upright pole on a centred cart, else 0. `swingup` starts with
    the pole hanging, `balance` with it upright.
    """
    if goal.endswith("_sparse"):
        centered = np.abs(state.cart_position) <= CENTERED
        return (centered & (state.pole_angle_cosine >= UPRIGHT)).astype(np.float64)
    upright = (state.pole_angle_cosine + 1) / 2
    centered = (1 + tolerance.near_zero(state.cart_position, margin=2)) / 2
    small_control = (4 + tolerance.near_zero_quadratic(control[..., 0], margin=1)) / 5
    small_velocity = (1 + tolerance.near_zero(state.angular_vel, margin=5)) / 2
    return upright * small_control * small_velocity * centered
