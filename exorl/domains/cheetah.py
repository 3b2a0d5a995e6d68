"""Cheetah: a planar body with two legs, which shall run as fast as it can.

`physics [..., 18]` is the positions rootx, rootz (m), rooty and six joint angles (rad): back
thigh, shin, foot, then front thigh, shin, foot; and the nine velocities in the same order.
"""

from typing import TYPE_CHECKING

import numpy as np

from exorl.domains import tolerance

if TYPE_CHECKING:
    from dm_control.rl.control import Environment

# Horizontal speed (meters/second) from which the reward is 1.
RUN_SPEED = 10.0

# The links, each with what its rotation adds to the horizontal velocity of the centre of mass:
# (x, z) is the mean over the whole body's mass of where that link carries it, from the link's
# joint and in the link's frame (meters). They follow from the masses and lengths in cheetah.xml.
LEVERS = np.array(
    [
        (0.042928870293, 0.011338912134),  # torso
        (0.041686192469, -0.062240585774),  # back thigh
        (-0.037782426778, -0.018891213389),  # back shin
        (0.002347280335, -0.007589539749),  # back foot
        (-0.028043933054, -0.048075313808),  # front thigh
        (0.013788702929, -0.019092050209),  # front shin
        (0.002843096234, -0.004422594142),  # front foot
    ]
)


def link_angles(joints: np.ndarray) -> np.ndarray:
    """Angles of the seven links to the world from (rooty, joints) `[..., 7]`; rates likewise."""
    torso = joints[..., :1]
    back = torso + np.cumsum(joints[..., 1:4], axis=-1)
    front = torso + np.cumsum(joints[..., 4:7], axis=-1)
    return np.concatenate([torso, back, front], axis=-1)


def speed(physics: np.ndarray) -> np.ndarray:
    """Horizontal velocity of the centre of mass (meters/second) `[...]`."""
    angle, rate = link_angles(physics[..., 2:9]), link_angles(physics[..., 11:18])
    swing = LEVERS[:, 1] * np.cos(angle) - LEVERS[:, 0] * np.sin(angle)
    return physics[..., 9] + np.sum(swing * rate, axis=-1)


def observation(physics: np.ndarray) -> np.ndarray:
    """All but the horizontal position, `[..., 17]`."""
    return physics[..., 1:]


def reward(goal: str, physics: np.ndarray, control: np.ndarray) -> np.ndarray:
    """Speed forward (`run`) or backward (`run_backward`) as a share of `RUN_SPEED`, `[...]`."""
    del control
    direction = {"run": 1, "run_backward": -1}[goal]
    return tolerance.at_least_linear(direction * speed(physics), RUN_SPEED, RUN_SPEED, 0)


def run_backward(seed: int) -> "Environment":
    """ExoRL's own task, which dm_control lacks: its cheetah and its start, the other direction."""
    from dm_control.rl import control
    from dm_control.suite import cheetah
    from dm_control.utils import rewards

    class Backward(cheetah.Cheetah):
        def get_reward(self, physics: cheetah.Physics) -> float:
            fast = rewards.tolerance(
                -physics.speed(),
                bounds=(RUN_SPEED, np.inf),
                margin=RUN_SPEED,
                value_at_margin=0,
                sigmoid="linear",
            )
            return float(fast)

    physics = cheetah.Physics.from_xml_string(*cheetah.get_model_and_assets())
    return control.Environment(physics, Backward(random=seed), time_limit=10)
