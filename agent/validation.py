"""Evaluation during training: the error on held-out chains, and short rollouts."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agent import networks, objective, sharding
from agent.checkpoint import Agent, TrainState
from agent.config import TrainConfig
from agent.evaluation import Evaluation
from agent.protocol import Protocol
from agent.results import flat
from data.batches import Batch
from data.normalize import Normalizer
from data.pool import Pool
from data.sampling import placed

_BATCHES = 4

SEED = 2
"""Of the rollouts' initial states: others than those of scripts.evaluate (0 by default) and
scripts.tune (1), so that a checkpoint is not chosen by the very states it is reported on."""


@dataclass(frozen=True)
class Found:
    """What an evaluation found.

    Attributes:
        values: to be recorded.
        score: what the best checkpoint has the highest of: the mean return in per cent of the
            tasks' attainable returns, or without rollouts minus the held-out error.
    """

    values: dict[str, float]
    score: float

    def line(self, step: int, last: int) -> str:
        """The same for people."""
        shown = "  ".join(f"{name} {value:.4g}" for name, value in self.values.items())
        return f"eval {step:>{len(str(last))}}/{last}  {shown}"


@dataclass(frozen=True)
class Validation:
    """Evaluates states of one run, always on the same held-out chains and initial states."""

    config: TrainConfig
    mesh: Mesh
    pool: Pool
    normalizer: Normalizer

    def __call__(self, state: TrainState, step: int) -> Found:
        """The held-out action error, and the returns of a few rollouts."""
        values = self._errors(state)
        score = -values["held_out/loss"]
        if self.config.evaluate_rollouts:
            returns, score = self._returns(state, step)
            values |= returns
        return Found(values, score)

    @cached_property
    def _batches(self) -> list[Batch]:
        sampler = networks.sampler(self.config, self.pool, self.normalizer, held_out=True)
        return [placed(sampler, self.mesh, self.config.seed, step) for step in range(_BATCHES)]

    @cached_property
    def _errors_of(self) -> Any:
        structure, _ = networks.abstract_parameters(self.config, self.mesh)
        timesteps = networks.dimensions(self.config).timesteps
        edges = objective.edges(timesteps, self.config.model.chunk)

        def errors(parameters: Any, batch: Batch) -> objective.Errors:
            predicted = networks.assemble(structure, parameters)(batch)
            return objective.action_errors(predicted, batch, edges)

        return jax.jit(
            errors,
            out_shardings=NamedSharding(self.mesh, PartitionSpec()),
            compiler_options=sharding.compiler_options(self.mesh),
        )

    def _errors(self, state: TrainState) -> dict[str, float]:
        found = [jax.device_get(self._errors_of(state.parameters, b)) for b in self._batches]
        total = np.sum([each.total for each in found], axis=0)
        count = np.sum([each.count for each in found], axis=0)
        values = {"held_out/loss": float(total.sum() / count.sum())}
        return values | {
            f"held_out/{name}": float(total[i] / count[i])
            for i, name in enumerate(objective.POSITIONS)
            if count[i]
        }

    def _returns(self, state: TrainState, step: int) -> tuple[dict[str, float], float]:
        structure, _ = networks.abstract_parameters(self.config, self.mesh)
        agent = Agent(
            config=self.config,
            structure=structure,
            parameters=state.parameters,
            normalizer=self.normalizer,
            best_returns={task: self.pool.best_return(task) for task in self.pool.tasks},
            mesh=self.mesh,
            step=step,
        )
        rollouts = Evaluation(agent, self.pool, chains=self.config.evaluate_rollouts, seed=SEED)
        protocol = Protocol(context="self", n=self.config.data.trajectories)
        results = flat(cell for cells in rollouts.run(rollouts.plan([protocol])) for cell in cells)
        values = {}
        for task in self.pool.tasks:
            episodes = [each for each in results if each.task == task]
            last = max(each.episode for each in episodes)
            for name, number in (("first", 0), ("last", last)):
                returns = [each.episode_return for each in episodes if each.episode == number]
                values[f"returns/{task}/{name}"] = float(np.mean(returns))
        return values, float(np.mean([each.percent for each in results]))
