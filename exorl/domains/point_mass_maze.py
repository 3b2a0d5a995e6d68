"""Point-mass maze: a ball in a square room with a cross-shaped wall, which shall reach a corner.

`physics [..., 4]` is the ball's position (x, y; m) and velocity.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from exorl.domains import tolerance
from exorl.domains.states import Meter, MjData, MjModel, States

if TYPE_CHECKING:
    from dm_control.rl.control import Environment

# Where the goals are (x, y; meters), and how close to it pays 1 (meters).
TARGETS = {
    "reach_top_left": (-0.15, 0.15),
    "reach_top_right": (0.15, 0.15),
    "reach_bottom_left": (-0.15, -0.15),
    "reach_bottom_right": (0.15, -0.15),
}
RADIUS = 0.015

# Every episode starts in the top left room, x and y uniform in these ranges (meters).
START = ((-0.29, -0.15), (0.15, 0.29))

_MODEL = Path(__file__).with_suffix(".xml")


class ClosedForm(States):
    """What rewards are made of, as closed forms."""

    @property
    def position(self) -> np.ndarray:
        """Where the ball is (meters) `[..., 2]`."""
        return self.physics[..., :2]


class Measured(NamedTuple):
    """The same as MuJoCo computes it."""

    x: np.ndarray
    y: np.ndarray

    @property
    def position(self) -> np.ndarray:
        """Where the ball is (meters) `[..., 2]`."""
        return np.stack(self, axis=-1)


def meter(mujoco: Any, model: MjModel) -> Meter:
    """Reads `Measured` off a state that was just set."""
    ball = model.geom("pointmass").id

    def measure(data: MjData) -> tuple[float, ...]:
        mujoco.mj_kinematics(model, data)
        return tuple(data.geom_xpos[ball, :2])

    return measure


def observation(physics: np.ndarray) -> np.ndarray:
    """The state itself, `[..., 4]`."""
    return physics


def reward(goal: str, state: ClosedForm | Measured, control: np.ndarray) -> np.ndarray:
    """Nearness to the goal, times a soft demand for little force, `[...]`."""
    distance = np.linalg.norm(state.position - np.array(TARGETS[goal]), axis=-1)
    force = tolerance.near_zero_quadratic(control, margin=1).mean(axis=-1)
    return tolerance.at_most(distance, RADIUS, RADIUS) * (4 + force) / 5


def environment(goal: str, seed: int) -> "Environment":
    """ExoRL's own maze. Its start is drawn from the task's own random state."""
    from dm_control.rl import control
    from dm_control.suite import common, point_mass
    from dm_control.suite.base import Task

    class Goal(point_mass.PointMass):
        def initialize_episode(self, physics: point_mass.Physics) -> None:
            for i, (low, high) in enumerate(START):
                physics.data.qpos[i] = self.random.uniform(low, high)
            Task.initialize_episode(self, physics)

    physics = point_mass.Physics.from_xml_string(_MODEL.read_text(), common.ASSETS)
    physics.named.model.geom_pos["target", :2] = TARGETS[goal]
    task = Goal(randomize_gains=False, random=seed)
    return control.Environment(physics, task, time_limit=20)
