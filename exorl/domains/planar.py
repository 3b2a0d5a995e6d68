"""Bodies of links in the x-z plane: what cheetah's and walker's momenta are made of.

A link turns about the y-axis at its joint. Where its centre of mass is, is then a sum over the
links above it and itself of constant levers, each turned by its own link's angle; everything
else follows by differentiating and weighing with the masses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from exorl.domains.states import Meter, MjData, MjModel


@dataclass(frozen=True)
class Link:
    """One rigid part, as its MJCF has it.

    Attributes:
        name: In the MJCF.
        parent: The link that its joint is on, None for the first, the root.
        joint: Where its joint is, (x, z) from the parent's joint in the parent's frame (meters).
        centre: Its centre of mass, (x, z) from its joint in its own frame (meters).
        mass: In kilograms.
        inertia: About the y-axis through its centre of mass (kg m²), for angular momenta.
    """

    name: str
    parent: str | None
    joint: tuple[float, float]
    centre: tuple[float, float]
    mass: float
    inertia: float = math.nan


@dataclass(frozen=True)
class PlanarBody:
    """L links, parents before children."""

    links: Sequence[Link]

    @cached_property
    def mass(self) -> float:
        """Of all links, in kilograms."""
        return float(self._masses.sum())

    @cached_property
    def _masses(self) -> np.ndarray:
        return np.array([link.mass for link in self.links])

    @cached_property
    def _levers(self) -> np.ndarray:
        """`[L, L, 2]`: what link j's rotation adds to the centre of mass of link i, (x, z)."""
        place = {link.name: i for i, link in enumerate(self.links)}
        levers = np.zeros((len(self.links), len(self.links), 2))
        for i, link in enumerate(self.links):
            levers[i, i] += link.centre
            while link.parent is not None:
                levers[i, place[link.parent]] += link.joint
                link = self.links[place[link.parent]]
        return levers

    @cached_property
    def mean_levers(self) -> np.ndarray:
        """`[L, 2]`: the same for the centre of mass of the whole body."""
        return np.einsum("i,ijk->jk", self._masses, self._levers) / self.mass

    def centre(self, angle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the whole body's centre of mass is, (x, z) `[...]` from the root's joint.

        Args:
            angle: `[..., L]` angles of the links (rad).
        """
        (x, z), cosine, sine = self.mean_levers.T, np.cos(angle), np.sin(angle)
        return cosine @ x + sine @ z, cosine @ z - sine @ x

    def forward_velocity(self, root: np.ndarray, angle: np.ndarray, rate: np.ndarray) -> np.ndarray:
        """Velocity of the whole body's centre of mass along x (meters/second) `[...]`.

        Args:
            root: `[...]` velocity of the torso's joint along x.
            angle: `[..., L]` angles of the links to the world (rad).
            rate: `[..., L]` their rates.
        """
        x, z = self.mean_levers.T
        return root + np.sum((z * np.cos(angle) - x * np.sin(angle)) * rate, axis=-1)

    def angular_momentum(self, angle: np.ndarray, rate: np.ndarray) -> np.ndarray:
        """Of all links about their common centre of mass, along y (kg m²/s) `[...]`.

        Args:
            angle: `[..., L]` angles of the links to the world (rad).
            rate: `[..., L]` their rates.
        """
        x, z = np.moveaxis(self._levers - self.mean_levers, -1, 0)  # each [i, j], from the centre
        cosine, sine = np.cos(angle), np.sin(angle)
        place_x, place_z = cosine @ x.T + sine @ z.T, cosine @ z.T - sine @ x.T
        cosine, sine = cosine * rate, sine * rate
        speed_x, speed_z = cosine @ z.T - sine @ x.T, -(cosine @ x.T) - sine @ z.T
        orbital = (place_z * speed_x - place_x * speed_z) @ self._masses
        return orbital + rate @ np.array([link.inertia for link in self.links])


def momenta(mujoco: Any, model: MjModel) -> Meter:
    """Reads what `PlanarBody` computes off a state that was just set.

    That is the velocity of the whole body's centre of mass along x (meters/second) and its
    angular momentum about it along y (kg m²/s).
    """
    torso = model.body("torso").id

    def measure(data: MjData) -> tuple[float, ...]:
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_comVel(model, data)
        mujoco.mj_subtreeVel(model, data)
        return data.subtree_linvel[torso, 0], data.subtree_angmom[torso, 1]

    return measure
