"""What to collect, and how the learning collector learns."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from exorl.paths import home

Method = Literal["random", "structured", "supervised"]


@dataclass(frozen=True)
class LearnerConfig:
    """DDPG (Lillicrap et al., 2016) small enough for a CPU core.

    The defaults are tuned for one core and two minutes; `exorl.collect.ddpg` has the algorithm.
    """

    width: int = 128
    """Units in each of the two hidden layers of actor and critic."""
    batch: int = 256
    """Transitions in an update."""
    learning_rate: float = 1e-3
    """Adam's, for actor and critic."""
    discount: float = 0.99
    """γ."""
    n_step: int = 3
    """Rewards summed before the critic takes over."""
    target_rate: float = 0.01
    """τ, how far the target critic moves towards the critic in an update."""
    noise: float = 0.2
    """σ of the Gaussian exploration noise on actions, cut at 0.3 where it smooths targets."""
    episodes_per_round: int = 2
    """Episodes played side by side by one policy, between two phases of learning."""
    uniform_rounds: int = 2
    """Rounds of uniformly random actions to begin with, at least 1."""
    updates_per_step: float = 0.25
    """Updates for each environment step."""

    def __post_init__(self):
        """Refuses what no agent could learn with."""
        _at_least(1, self, "width", "batch", "n_step", "episodes_per_round", "uniform_rounds")
        _at_least(0, self, "learning_rate", "discount", "target_rate", "noise", "updates_per_step")


@dataclass(frozen=True)
class CollectConfig:
    """One collection: which episodes, and where to."""

    task: str
    """Name of the task, such as cheetah_run; only `supervised` looks at its reward."""
    method: Method
    """random: uniform actions. structured: for every episode another random rhythm or random
    network. supervised: the whole replay of an agent that learns the task, from bad to good."""
    out: Path | None = None
    """Folder for the episodes, by default episodes/TASK/METHOD under $EXORING_HOME. Episodes
    already there are kept."""
    steps: int = 200_000
    """Environment steps, rounded up to whole episodes (or rounds of them)."""
    seed: int = 0
    """Episode i of `random` and `structured` depends on the seed and on i, on nothing else."""
    processes: int | None = None
    """Processes for `random` and `structured`; by default as many as there are cores, if it
    pays. `supervised` learns in this one."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Settings of the agent that `supervised` trains."""

    def __post_init__(self):
        """Refuses what no collector could do."""
        if self.method not in get_args(Method):
            expected = ", ".join(get_args(Method))
            raise ValueError(f"method is {self.method!r}, expected one of {expected}")
        _at_least(1, self, "steps", "processes")
        _at_least(0, self, "seed")

    @property
    def folder(self) -> Path:
        """Where the episodes go."""
        return Path(self.out or home() / "episodes" / self.task / self.method)


def _at_least(least: int, config: LearnerConfig | CollectConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= least:
            raise ValueError(f"{name} is {value}, expected at least {least}")
