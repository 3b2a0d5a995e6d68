"""Cheetah: a planar body with two legs, which shall run, walk or turn over.

`physics [..., 18]` is the positions rootx, rootz (m), rooty and six joint angles (rad): back
thigh, shin, foot, then front thigh, shin, foot; and the nine velocities in the same order.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from exorl.domains import planar, tolerance
from exorl.domains.planar import Link, PlanarBody
from exorl.domains.states import States

if TYPE_CHECKING:
    from dm_control.rl.control import Environment

# Horizontal speeds (meters/second) and the angular momentum (kg m²/s) from which rewards are 1.
RUN_SPEED = 10.0
WALK_SPEED = 2.0
SPIN = 5.0

# Of cheetah.xml, whose masses are scaled to 14 kg in all.
BODY = PlanarBody(
    (
        Link(
            "torso",
            None,
            joint=(0, 0),
            centre=(0.15238987816307403, 0.025398313027179008),
            mass=6.25020920502092,
            inertia=0.8971176881117483,
        ),
        Link(
            "bthigh",
            "torso",
            joint=(-0.5, 0),
            centre=(0.1, -0.13),
            mass=1.5435146443514645,
            inertia=0.016844339581589953,
        ),
        Link(
            "bshin",
            "bthigh",
            joint=(0.16, -0.25),
            centre=(-0.14, -0.07),
            mass=1.5874476987447697,
            inertia=0.018267419079497905,
        ),
        Link(
            "bfoot",
            "bshin",
            joint=(-0.28, -0.14),
            centre=(0.03, -0.097),
            mass=1.0953974895397491,
            inertia=0.0063524232635983275,
        ),
        Link(
            "fthigh",
            "torso",
            joint=(0.5, 0),
            centre=(-0.07, -0.12),
            mass=1.4380753138075317,
            inertia=0.013739643347280341,
        ),
        Link(
            "fshin",
            "fthigh",
            joint=(-0.14, -0.24),
            centre=(0.065, -0.09),
            mass=1.200836820083682,
            inertia=0.008222108619246861,
        ),
        Link(
            "ffoot",
            "fshin",
            joint=(0.13, -0.18),
            centre=(0.045, -0.07),
            mass=0.8845188284518829,
            inertia=0.003529109456066946,
        ),
    )
)


def link_angles(joints: np.ndarray) -> np.ndarray:
    """Angles of the seven links to the world from (rooty, joints) `[..., 7]`; rates likewise."""
    torso = joints[..., :1]
    back = torso + np.cumsum(joints[..., 1:4], axis=-1)
    front = torso + np.cumsum(joints[..., 4:7], axis=-1)
    return np.concatenate([torso, back, front], axis=-1)


class ClosedForm(States):
    """What rewards are made of, as closed forms, `[...]` each."""

    @property
    def speed(self) -> np.ndarray:
        """Horizontal velocity of the centre of mass (meters/second)."""
        return BODY.forward_velocity(self.physics[..., 9], *self._links)

    @property
    def angular_momentum(self) -> np.ndarray:
        """Of the whole body about its centre of mass, along y (kg m²/s)."""
        return BODY.angular_momentum(*self._links)

    @property
    def _links(self) -> tuple[np.ndarray, np.ndarray]:
        return link_angles(self.physics[..., 2:9]), link_angles(self.physics[..., 11:18])


class Measured(NamedTuple):
    """The same as MuJoCo computes it."""

    speed: np.ndarray
    angular_momentum: np.ndarray


meter = planar.momenta


def observation(physics: np.ndarray) -> np.ndarray:
    """All but the horizontal position, `[..., 17]`."""
    return physics[..., 1:]


def reward(goal: str, state: ClosedForm | Measured, control: np.ndarray) -> np.ndarray:
    """The share of the wanted speed or spin that is reached, `[...]`; `_backward` turns it round.

    `walk` is of controllable_agent, the other goals are ExoRL's.
    """
    del control
    kind, direction, wanted = _meaning(goal)
    reached = state.angular_momentum if kind == "flip" else state.speed
    return tolerance.at_least_linear(direction * reached, wanted, wanted, 0)


def _meaning(goal: str) -> tuple[str, int, float]:
    """What is to be reached, in which direction, and how much of it pays 1."""
    kind = goal.removesuffix("_backward")
    wanted = {"run": RUN_SPEED, "walk": WALK_SPEED, "flip": SPIN}[kind]
    return kind, 1 if kind == goal else -1, wanted


def environment(goal: str, seed: int) -> "Environment":
    """ExoRL's own tasks, which dm_control lacks: its cheetah and its start, other rewards."""
    from dm_control.rl import control
    from dm_control.suite import cheetah
    from dm_control.utils import rewards

    kind, direction, wanted = _meaning(goal)

    class Goal(cheetah.Cheetah):
        def get_reward(self, physics: cheetah.Physics) -> float:
            if kind == "flip":
                reached = physics.named.data.subtree_angmom["torso", 1]
            else:
                reached = physics.speed()
            share = rewards.tolerance(
                direction * reached,
                bounds=(wanted, np.inf),
                margin=wanted,
                value_at_margin=0,
                sigmoid="linear",
            )
            return float(share)

    physics = cheetah.Physics.from_xml_string(*cheetah.get_model_and_assets())
    return control.Environment(physics, Goal(random=seed), time_limit=10)
