"""Jaco: an arm with a three-fingered hand, which shall reach one of four places on the table.

`physics [..., 18]` is the angles of the arm's six and the hand's three joints (rad) and their
rates. The observations hold, in entries 30 to 32, the point between the fingers.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from exorl.domains import tolerance
from exorl.domains.states import Meter, MjData, MjModel, States

# Where the goals are (x, y, z; meters), and how close to it pays 1 (meters).
TARGETS = {
    "reach_top_left": (-0.09, 0.09, 0.001),
    "reach_top_right": (0.09, 0.09, 0.001),
    "reach_bottom_left": (-0.09, -0.09, 0.001),
    "reach_bottom_right": (0.09, -0.09, 0.001),
}
RADIUS = 0.05

_HAND = "jaco_arm/jaco_hand/"
_JOINTS = [f"jaco_arm/joint_{i}" for i in range(1, 7)]


class ClosedForm(States):
    """What rewards are made of, read from observations."""

    @property
    def hand(self) -> np.ndarray:
        """The point between the fingers (meters) `[..., 3]`."""
        return self.observation[..., 30:33]


class Measured(NamedTuple):
    """The same as MuJoCo computes it."""

    x: np.ndarray
    y: np.ndarray
    z: np.ndarray

    @property
    def hand(self) -> np.ndarray:
        """The point between the fingers (meters) `[..., 3]`."""
        return np.stack(self, axis=-1)


def meter(mujoco: Any, model: MjModel) -> Meter:
    """Reads `Measured` off a state that was just set."""
    pinch = model.site(f"{_HAND}pinchsite").id

    def measure(data: MjData) -> tuple[float, ...]:
        mujoco.mj_kinematics(model, data)
        return tuple(data.site_xpos[pinch])

    return measure


def sensors(model: MjModel) -> Callable[[MjData], np.ndarray]:
    """Reads observations `[42]` off a simulated state.

    The torque sensors show what happened during the last step, which the state does not hold.
    """
    pinch = model.site(f"{_HAND}pinchsite").id
    torques = [model.sensor(f"{joint}_torque").adr[0] for joint in _JOINTS]
    axes = np.array([model.joint(joint).axis for joint in _JOINTS])
    about_axes = np.add.outer(torques, np.arange(3))

    def read(data: MjData) -> np.ndarray:
        arm, fingers = data.qpos[:6], data.qpos[6:]
        angles = np.stack([np.sin(arm), np.cos(arm)], axis=-1).ravel()
        torque = np.einsum("ij,ij->i", data.sensordata[about_axes], axes)
        torque = np.sign(torque) * np.log1p(np.abs(torque))
        hand = (fingers, data.qvel[6:], data.site_xpos[pinch], data.site_xmat[pinch])
        return np.concatenate([angles, torque, data.qvel[:6], *hand])

    return read


def observed_state(physics: np.ndarray, measured: Measured) -> tuple[np.ndarray, np.ndarray]:
    """Entries `[K]` of observations that the state tells, and what it tells `[..., K]`."""
    arm, fingers = physics[..., :6], physics[..., 6:9]
    angles = np.stack([np.sin(arm), np.cos(arm)], axis=-1).reshape(*arm.shape[:-1], 12)
    values = (angles, physics[..., 9:15], fingers, physics[..., 15:], measured.hand)
    return np.r_[0:12, 18:33], np.concatenate(values, axis=-1)


def reward(goal: str, state: ClosedForm | Measured, control: np.ndarray) -> np.ndarray:
    """Nearness of the point between the fingers to the goal, `[...]`."""
    del control
    distance = np.linalg.norm(state.hand - np.array(TARGETS[goal]), axis=-1)
    return tolerance.at_most(distance, RADIUS, RADIUS)


def environment(goal: str, seed: int) -> Any:
    """dm_control's reaching task with the target at a fixed place and not in the observation.

    A `composer.Environment`, which can't be pickled: build it in the process that steps it.
    """
    from dm_control import composer
    from dm_control.manipulation import reach
    from dm_control.manipulation.shared import arenas, constants, observations, robots, workspaces

    place = TARGETS[goal]
    workspace = SimpleNamespace(
        target_bbox=workspaces.BoundingBox(lower=place, upper=place),
        tcp_bbox=workspaces.BoundingBox(lower=(-0.2, -0.2, 0.02), upper=(0.2, 0.2, 0.4)),
        arm_offset=robots.ARM_OFFSET,
    )
    features = observations.PERFECT_FEATURES
    hidden = observations.VISION.prop_pose
    settings = features._replace(prop_pose=hidden)
    task = reach.Reach(
        arena=arenas.Standard(),
        arm=robots.make_arm(settings),
        hand=robots.make_hand(settings),
        prop=None,
        obs_settings=settings,
        workspace=workspace,
        control_timestep=constants.CONTROL_TIMESTEP,
    )
    # Nothing in the model changes between episodes.
    return composer.Environment(
        task, time_limit=10, random_state=seed, recompile_mjcf_every_episode=False
    )
