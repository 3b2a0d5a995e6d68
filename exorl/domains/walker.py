"""Walker: a planar body on two legs, which shall stand, walk, run or turn over.

`physics [..., 18]` is the positions rootz, rootx (m), rooty and six joint angles (rad): right
hip, knee, ankle, then left hip, knee, ankle; and the nine velocities in the same order.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from exorl.domains import planar, tolerance
from exorl.domains.planar import Link, PlanarBody
from exorl.domains.states import Meter, MjData, MjModel, States

if TYPE_CHECKING:
    from dm_control.rl.control import Environment

# Height of the torso (meters) at rootz = 0, from walker.xml.
INITIAL_HEIGHT = 1.3

# Height of the torso (meters) from which the stand reward is 1.
STAND_HEIGHT = 1.2

# Horizontal speeds (meters/second) from which the move reward is 1.
WALK_SPEED = 1.0
RUN_SPEED = 8.0

# Angular momentum (kg m²/s) from which the flip reward is 1.
SPIN = 5.0

_THIGH = {"joint": (0, -0.3), "centre": (0, -0.225), "mass": 4.057890510886818}
_LEG = {"joint": (0, -0.45), "centre": (0, -0.25), "mass": 2.7813566959781637}
_FOOT = {"joint": (0, -0.5), "centre": (0.06, 0), "mass": 2.094395102393196}

# Of walker.xml.
BODY = PlanarBody(
    (
        Link("torso", None, (0, 0), (0, 0), 10.673037441795724, 0.44315580337296034),
        Link("right_thigh", "torso", **_THIGH, inertia=0.09329875682692193),
        Link("right_leg", "right_thigh", **_LEG, inertia=0.07230254017320971),
        Link("right_foot", "right_leg", **_FOOT, inertia=0.013940817400304714),
        Link("left_thigh", "torso", **_THIGH, inertia=0.09329875682692193),
        Link("left_leg", "left_thigh", **_LEG, inertia=0.07230254017320971),
        Link("left_foot", "left_leg", **_FOOT, inertia=0.013940817400304714),
    )
)


def link_angles(joints: np.ndarray) -> np.ndarray:
    """Angles of the seven links to the world from (rooty, joints) `[..., 7]`; rates likewise."""
    torso = joints[..., :1]  # the legs' joints turn against the torso's axis
    right = torso - np.cumsum(joints[..., 1:4], axis=-1)
    left = torso - np.cumsum(joints[..., 4:7], axis=-1)
    return np.concatenate([torso, right, left], axis=-1)


class ClosedForm(States):
    """What rewards are made of, as closed forms, `[...]` each."""

    @property
    def torso_upright(self) -> np.ndarray:
        """Projection of the torso's z-axis on the world's."""
        return np.cos(self.physics[..., 2])

    @property
    def torso_height(self) -> np.ndarray:
        """Height of the torso (meters)."""
        return INITIAL_HEIGHT + self.physics[..., 0]

    @property
    def horizontal_velocity(self) -> np.ndarray:
        """Horizontal velocity of the centre of mass (meters/second)."""
        return BODY.forward_velocity(self.physics[..., 10], *self._links)

    @property
    def angular_momentum(self) -> np.ndarray:
        """Of the whole body about its centre of mass, along y (kg m²/s)."""
        return BODY.angular_momentum(*self._links)

    @property
    def _links(self) -> tuple[np.ndarray, np.ndarray]:
        return link_angles(self.physics[..., 2:9]), link_angles(self.physics[..., 11:18])


class Measured(NamedTuple):
    """The same as MuJoCo computes it."""

    torso_upright: np.ndarray
    torso_height: np.ndarray
    horizontal_velocity: np.ndarray
    angular_momentum: np.ndarray


def meter(mujoco: Any, model: MjModel) -> Meter:
    """Reads `Measured` off a state that was just set."""
    momenta, torso = planar.momenta(mujoco, model), model.body("torso").id

    def measure(data: MjData) -> tuple[float, ...]:
        velocity, momentum = momenta(data)
        return data.xmat[torso, 8], data.xpos[torso, 2], velocity, momentum

    return measure


def orientations(physics: np.ndarray) -> np.ndarray:
    """Cosine and sine of each link's angle, in pairs, `[..., 14]`."""
    angle = link_angles(physics[..., 2:9])
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).reshape(*angle.shape[:-1], 14)


def observation(physics: np.ndarray) -> np.ndarray:
    """Orientations, height and velocities, `[..., 24]`."""
    height = INITIAL_HEIGHT + physics[..., :1]
    return np.concatenate([orientations(physics), height, physics[..., 9:]], axis=-1)


def reward(goal: str, state: ClosedForm | Measured, control: np.ndarray) -> np.ndarray:
    """Standing tall and upright, times the speed (`walk`, `run`) or spin (`flip`), `[...]`."""
    del control
    standing = tolerance.at_least(state.torso_height, STAND_HEIGHT, STAND_HEIGHT / 2)
    upright = (1 + state.torso_upright) / 2
    stand = (3 * standing + upright) / 4
    if goal == "stand":
        return stand
    if goal == "flip":
        spin = tolerance.at_least_linear(state.angular_momentum, SPIN, SPIN, 0)
        return stand * (5 * spin + 1) / 6
    speed = {"walk": WALK_SPEED, "run": RUN_SPEED}[goal]
    move = tolerance.at_least_linear(state.horizontal_velocity, speed, speed / 2, 0.5)
    return stand * (5 * move + 1) / 6


def environment(goal: str, seed: int) -> "Environment":
    """ExoRL's own `flip`, which dm_control lacks: its walker and its start, another reward."""
    assert goal == "flip", goal
    from dm_control.rl import control
    from dm_control.suite import walker
    from dm_control.utils import rewards

    class Flip(walker.PlanarWalker):
        def get_reward(self, physics: walker.Physics) -> float:
            spin = rewards.tolerance(
                physics.named.data.subtree_angmom["torso", 1],
                bounds=(SPIN, np.inf),
                margin=SPIN,
                value_at_margin=0,
                sigmoid="linear",
            )
            return float(super().get_reward(physics) * (5 * spin + 1) / 6)

    physics = walker.Physics.from_xml_string(*walker.get_model_and_assets())
    task = Flip(move_speed=0, random=seed)
    return control.Environment(physics, task, time_limit=25, control_timestep=0.025)
