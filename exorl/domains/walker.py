"""Walker: a planar body on two legs, which shall stand, walk or run.

`physics [..., 18]` is the positions rootz, rootx (m), rooty and six joint angles (rad): right
hip, knee, ankle, then left hip, knee, ankle; and the nine velocities in the same order.
"""

import numpy as np

from exorl.domains import tolerance

# Height of the torso (meters) at rootz = 0, from walker.xml.
INITIAL_HEIGHT = 1.3

# Height of the torso (meters) from which the stand reward is 1.
STAND_HEIGHT = 1.2

# Horizontal speeds (meters/second) from which the move reward is 1.
WALK_SPEED = 1.0
RUN_SPEED = 8.0

# The links, each with what its rotation adds to the horizontal velocity of the centre of mass:
# (x, z) is the mean over the whole body's mass of where that link carries it, from the link's
# joint and in the link's frame (meters). They follow from the masses and lengths in walker.xml.
LEVERS = np.array(
    [
        (0, -0.187810963528),  # torso
        (0, -0.108867505687),  # right thigh
        (0, -0.061055257944),  # right leg
        (0.004403023409, 0),  # right foot
        (0, -0.108867505687),  # left thigh
        (0, -0.061055257944),  # left leg
        (0.004403023409, 0),  # left foot
    ]
)


def link_angles(joints: np.ndarray) -> np.ndarray:
    """Angles of the seven links to the world from (rooty, joints) `[..., 7]`; rates likewise."""
    torso = joints[..., :1]  # the legs' joints turn against the torso's axis
    right = torso - np.cumsum(joints[..., 1:4], axis=-1)
    left = torso - np.cumsum(joints[..., 4:7], axis=-1)
    return np.concatenate([torso, right, left], axis=-1)


def torso_upright(physics: np.ndarray) -> np.ndarray:
    """Projection of the torso's z-axis on the world's, `[...]`."""
    return np.cos(physics[..., 2])


def torso_height(physics: np.ndarray) -> np.ndarray:
    """Height of the torso (meters) `[...]`."""
    return INITIAL_HEIGHT + physics[..., 0]


def horizontal_velocity(physics: np.ndarray) -> np.ndarray:
    """Horizontal velocity of the centre of mass (meters/second) `[...]`."""
    angle, rate = link_angles(physics[..., 2:9]), link_angles(physics[..., 11:18])
    swing = LEVERS[:, 1] * np.cos(angle) - LEVERS[:, 0] * np.sin(angle)
    return physics[..., 10] + np.sum(swing * rate, axis=-1)


def orientations(physics: np.ndarray) -> np.ndarray:
    """Cosine and sine of each link's angle, in pairs, `[..., 14]`."""
    angle = link_angles(physics[..., 2:9])
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).reshape(*angle.shape[:-1], 14)


def observation(physics: np.ndarray) -> np.ndarray:
    """Orientations, height and velocities, `[..., 24]`."""
    height = torso_height(physics)[..., None]
    return np.concatenate([orientations(physics), height, physics[..., 9:]], axis=-1)


def reward(goal: str, physics: np.ndarray, control: np.ndarray) -> np.ndarray:
    """Standing tall and upright, times the wanted speed for `walk` and `run`, `[...]`."""
    del control
    standing = tolerance.at_least(torso_height(physics), STAND_HEIGHT, STAND_HEIGHT / 2)
    upright = (1 + torso_upright(physics)) / 2
    stand = (3 * standing + upright) / 4
    if goal == "stand":
        return stand
    speed = {"walk": WALK_SPEED, "run": RUN_SPEED}[goal]
    move = tolerance.at_least_linear(horizontal_velocity(physics), speed, speed / 2, 0.5)
    return stand * (5 * move + 1) / 6
