"""Quadruped: a torso on four jointed legs, free in space, which shall stand, walk, run or jump.

`physics [..., 57]` is the torso's position (m) and quaternion, for each leg (front left, front
right, back right, back left) the angles of yaw, pitch, knee and ankle (rad); the torso's velocity
in the world's axes and its rotation in its own, the 16 joints' rates; and 12 filtered controls.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from exorl.domains import tolerance
from exorl.domains.planar import Link, PlanarBody
from exorl.domains.states import Meter, MjData, MjModel, States

if TYPE_CHECKING:
    from dm_control.rl.control import Environment

# Forward speeds (meters/second) and the height of the centre of mass (meters) that pay 1.
WALK_SPEED = 0.5
RUN_SPEED = 5.0
JUMP_HEIGHT = 1.0

TORSO_MASS = 67.85840131753953  # kilograms, centred at the torso's origin

# Where the legs are on the torso (x, y; meters), and which way they point (rad).
HIPS = np.array([[0.2, 0.2], [0.2, -0.2], [-0.2, -0.2], [-0.2, 0.2]])
HEADINGS = np.deg2rad([45, -45, -135, 135])

# A leg, seen in the plane that its yaw turns. The toe is fixed to the foot.
LEG = PlanarBody(
    (
        Link("hip", None, joint=(0, 0), centre=(0.15, 0.055), mass=4.284605324198986),
        Link("knee", "hip", joint=(0.3, 0.11), centre=(0.125, -0.125), mass=2.9215708067096187),
        Link("ankle", "knee", joint=(0.25, -0.25), centre=(0, -0.125), mass=1.5363697072993086),
        Link("toe", "ankle", joint=(0, -0.3), centre=(0, 0), mass=1.0723302924253162),
    )
)


class ClosedForm(States):
    """What rewards are made of, as closed forms, `[...]` each."""

    @property
    def torso_upright(self) -> np.ndarray:
        """Projection of the torso's z-axis on the world's."""
        return self._axes()[..., 2, 2]

    @property
    def torso_velocity(self) -> np.ndarray:
        """Velocity of the torso along its own x-axis (meters/second)."""
        return np.sum(self._axes()[..., :, 0] * self.physics[..., 23:26], axis=-1)

    @property
    def com_height(self) -> np.ndarray:
        """Height of the whole body's centre of mass (meters)."""
        joints = self.physics[..., 7:23].reshape(*self.physics.shape[:-1], 4, 4)
        heading = HEADINGS + joints[..., 0]
        ankle = np.cumsum(joints[..., 1:], axis=-1)
        forward, up = LEG.centre(np.concatenate([ankle, ankle[..., -1:]], axis=-1))
        turned = np.stack([np.cos(heading), np.sin(heading)], axis=-1)
        leg = np.concatenate([HIPS + turned * forward[..., None], up[..., None]], axis=-1)
        centre = LEG.mass * leg.sum(axis=-2) / (TORSO_MASS + 4 * LEG.mass)
        return self.physics[..., 2] + np.sum(self._axes()[..., 2, :] * centre, axis=-1)

    def _axes(self) -> np.ndarray:
        """The torso's axes in the world, as columns, `[..., 3, 3]`."""
        quaternion = self.physics[..., 3:7]
        w, x, y, z = np.moveaxis(
            quaternion / np.linalg.norm(quaternion, axis=-1, keepdims=True), -1, 0
        )
        columns = (
            np.stack([1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)], axis=-1),
            np.stack([2 * (x * y - w * z), 1 - 2 * (x * x + z * z), 2 * (y * z + w * x)], axis=-1),
            np.stack([2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)], axis=-1),
        )
        return np.stack(columns, axis=-1)


class Measured(NamedTuple):
    """The same as MuJoCo computes it."""

    torso_upright: np.ndarray
    torso_velocity: np.ndarray
    com_height: np.ndarray


def meter(mujoco: Any, model: MjModel) -> Meter:
    """Reads `Measured` off a state that was just set."""
    torso = model.body("torso").id

    def measure(data: MjData) -> tuple[float, ...]:
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        axes = data.xmat[torso]
        return axes[8], axes[0::3] @ data.qvel[:3], data.subtree_com[torso, 2]

    return measure


def sensors(model: MjModel) -> Callable[[MjData], np.ndarray]:
    """Reads observations `[78]` off a simulated state.

    The accelerometer and the toes' force sensors show what happened during the last step, which
    the state does not hold.
    """
    torso = model.body("torso").id
    velocity = _readings(model, "velocimeter")
    imu = _readings(model, "imu_accel", "imu_gyro")
    toes = [f"toe_{side}" for side in ("front_left", "front_right", "back_right", "back_left")]
    forces = _readings(model, *(f"{kind}_{toe}" for kind in ("force", "torque") for toe in toes))

    def read(data: MjData) -> np.ndarray:
        sensed = data.sensordata
        parts = (data.qpos[7:], data.qvel[6:], data.act, sensed[velocity], data.xmat[torso, 8:])
        return np.concatenate([*parts, sensed[imu], np.arcsinh(sensed[forces])])

    return read


def observed_state(physics: np.ndarray, measured: Measured) -> tuple[np.ndarray, np.ndarray]:
    """Entries `[K]` of observations that the state tells, and what it tells `[..., K]`.

    That is all of the joints and the filtered controls, and how upright the torso is.
    """
    values = (physics[..., 7:23], physics[..., 29:], measured.torso_upright[..., None])
    return np.r_[0:44, 47], np.concatenate(values, axis=-1)


def _readings(model: MjModel, *names: str) -> np.ndarray:
    """Where the three readings of each of these sensors are."""
    return np.concatenate([model.sensor(name).adr[0] + np.arange(3) for name in names])


def reward(goal: str, state: ClosedForm | Measured, control: np.ndarray) -> np.ndarray:
    """Upright, times the speed (`walk`, `run`) or height (`jump`) reached, `[...]`.

    `stand` and `jump` are of ExoRL, the others dm_control's.
    """
    del control
    upright = (1 + state.torso_upright) / 2
    if goal == "stand":
        return upright
    if goal == "jump":
        height = tolerance.at_least_linear(state.com_height, JUMP_HEIGHT, JUMP_HEIGHT, 0.5)
        return upright * height
    speed = {"walk": WALK_SPEED, "run": RUN_SPEED}[goal]
    return upright * tolerance.at_least_linear(state.torso_velocity, speed, speed, 0.5)


def environment(goal: str, seed: int) -> "Environment":
    """ExoRL's own `stand` and `jump`: dm_control's quadruped and its start, other rewards."""
    from dm_control.rl import control
    from dm_control.suite import common, quadruped
    from dm_control.utils import rewards

    def linear(value: float, wanted: float, margin: float, value_at_margin: float) -> float:
        bounds = (wanted, np.inf)
        found = rewards.tolerance(
            value, bounds=bounds, margin=margin, value_at_margin=value_at_margin, sigmoid="linear"
        )
        return float(found)

    class Goal(quadruped.Move):
        def get_reward(self, physics: quadruped.Physics) -> float:
            upright = linear(float(physics.torso_upright()), 1, 2, 0)
            if goal == "stand":
                return upright
            height = physics.named.data.sensordata["center_of_mass"][2]
            return upright * linear(height, JUMP_HEIGHT, JUMP_HEIGHT, 0.5)

    physics = quadruped.Physics.from_xml_string(quadruped.make_model(floor_size=10), common.ASSETS)
    task = Goal(desired_speed=0, random=seed)
    return control.Environment(physics, task, time_limit=20, control_timestep=0.02)
