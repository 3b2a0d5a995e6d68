"""What each domain's states mean: observations and rewards, one file a domain.

The files follow `dm_control.suite`, whose names the accessors keep. Each has:

- `ClosedForm`: what its rewards are made of, computed from arrays of states;
- `meter(mujoco, model)`: the same, read off MuJoCo after as little of its work as will do;
- `reward(goal, state, control)`: rewards from either of them;
- `observation(physics)`, or, where sensors add what the state does not hold, `sensors(model)` and
  `observed_state(physics, measured)`, the part of the observation that it does hold;
- `environment(goal, seed)`, if dm_control lacks some of its tasks.
"""

from exorl.domains import cartpole, cheetah, jaco, point_mass_maze, quadruped, walker

DOMAINS = {
    "cartpole": cartpole,
    "cheetah": cheetah,
    "jaco": jaco,
    "point_mass_maze": point_mass_maze,
    "quadruped": quadruped,
    "walker": walker,
}
