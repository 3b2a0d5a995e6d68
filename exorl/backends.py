"""What rewards are made of, from MuJoCo itself: slower than the closed forms, and their check."""

import functools
import importlib
from typing import Any

import numpy as np

from exorl import suite
from exorl.domains import DOMAINS
from exorl.domains.states import MjData, MjModel
from exorl.tasks import Task


def measure(task: Task, physics: np.ndarray) -> Any:
    """The domain's `Measured` of states `[..., P]` float64, `[...]` each.

    MuJoCo places the bodies and, where rewards ask for it, finds velocities and momenta; it
    neither looks for contacts nor solves for forces.
    """
    domain = DOMAINS[task.domain]
    model = _model(task.name)
    mujoco = importlib.import_module("mujoco")  # after `suite.load` saw that its version fits
    data, read = mujoco.MjData(model), domain.meter(mujoco, model)
    states = physics.reshape(-1, physics.shape[-1])
    values = np.empty((len(states), len(domain.Measured._fields)))
    for row, state in zip(values, states, strict=True):
        set_state(mujoco, model, data, state)
        row[:] = read(data)
    return domain.Measured(*np.moveaxis(values.reshape(*physics.shape[:-1], -1), -1, 0))


def ask_dm_control(task: Task, physics: np.ndarray, control: np.ndarray | None) -> np.ndarray:
    """Rewards `[...]` float64 of states `[..., P]` as dm_control's own task pays them.

    As in the published ExoRL code (`relable_episode`), which however leaves the control at zero.

    Args:
        task: Whose rewards.
        physics: `[..., P]` float64.
        control: `[..., A]` in [-1, 1], which led to the states; None leaves it at zero.
    """
    environment = _environment(task.name)
    motors = environment.action_spec()
    states = physics.reshape(-1, physics.shape[-1])
    rewards = np.empty(len(states))
    if control is not None:
        control = suite.scaling(motors.minimum, motors.maximum)(control)
        control = control.reshape(-1, control.shape[-1])
    for i, state in enumerate(states):
        with environment.physics.reset_context():
            environment.physics.set_state(state)
        if control is not None:
            environment.physics.set_control(control[i])
        rewards[i] = environment.task.get_reward(environment.physics)
    return rewards.reshape(physics.shape[:-1])


def set_state(mujoco: Any, model: MjModel, data: MjData, state: np.ndarray) -> None:
    """Sets qpos, qvel and act from a state `[P]`; what depends on them is left as it was."""
    kinds = mujoco.mjtState
    parts = kinds.mjSTATE_QPOS | kinds.mjSTATE_QVEL | kinds.mjSTATE_ACT
    mujoco.mj_setState(model, data, state, parts)


@functools.cache
def _environment(task: str) -> Any:
    environment = suite.load(task, seed=0)
    environment.reset()  # a manipulation environment compiles its model only now
    return environment


def _model(task: str) -> MjModel:
    return _environment(task).physics.model.ptr
