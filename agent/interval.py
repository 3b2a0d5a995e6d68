"""What a run's steps were like between two log lines, as a record and as a line for people."""

import math
import time
from collections import defaultdict
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from agent import checkpoint, networks, objective, throughput
from agent.config import TRANSFORMERS, TrainConfig
from data.sampling import Sampler


class Interval:
    """What happens between two log lines. Values stay on the devices until the interval ends."""

    def __init__(
        self, config: TrainConfig, sampler: Sampler, peak: throughput.Peak, mesh: Mesh, last: int
    ) -> None:
        self._config, self._sampler, self._peak, self._mesh = config, sampler, peak, mesh
        self._last = last
        self._parameters = networks.parameter_count(config, mesh)
        self.restart()

    def restart(self) -> None:
        """Begin again; what was not closed is forgotten."""
        self._pending: list[tuple[int, tuple[int, int], Any]] = []
        self._since = time.perf_counter()

    def pause(self, seconds: float) -> None:
        """Leave out time, such as compiling took."""
        self._since += seconds

    def add(self, trajectories: int, shape: tuple[int, int], values: Any) -> None:
        """One step's n, B and S, and what it returned, still being computed.

        Waits for the step before the last: more of them in the queue would gain nothing, and pile
        up their batches on the devices.
        """
        self._pending.append((trajectories, shape, values))
        if len(self._pending) > 2:
            jax.block_until_ready(self._pending[-3][2])

    def close(self, step: int) -> dict[str, float]:
        """Wait for the interval's steps, the last of which was number ``step``, and sum them up.

        Raises:
            FloatingPointError: a loss that is not finite.
        """
        pending = [(n, shape, jax.device_get(values)) for n, shape, values in self._pending]
        elapsed = time.perf_counter() - self._since
        self._check(step, [values for _, _, values in pending])
        record = {
            name: float(np.mean([values[name] for _, _, values in pending]))
            for name in ("loss", "gradient_norm", "update_norm", "parameter_norm")
        }
        record |= _by_position([values for _, _, values in pending])
        record |= _by_trajectories([(n, float(values["loss"])) for n, _, values in pending])
        sizes = [rows * steps for _, (rows, steps), _ in pending]
        flops = sum(
            throughput.step_flops(self._config, self._parameters, *shape) for _, shape, _ in pending
        )
        per_step = self._config.tokens_per_step if self._config.method in TRANSFORMERS else 1
        record["tokens_per_second"] = sum(sizes) * per_step / elapsed
        record["steps_per_second"] = len(pending) / elapsed
        record["mfu"] = flops / elapsed / self._peak.flops_per_second
        record["memory_bytes"] = throughput.memory_bytes(self._mesh)
        record["learning_rate"] = float(pending[-1][2]["learning_rate"])
        self.restart()
        return record

    def _check(self, step: int, values: list[Any]) -> None:
        first = step - len(values)
        for offset, each in enumerate(values):
            if math.isfinite(each["loss"]) and math.isfinite(each["gradient_norm"]):
                continue
            seed, run = self._config.seed, self._config.run
            rows = list(self._sampler.names(seed, first + offset))
            shown = "; ".join(rows[:8]) + (f"; {len(rows) - 8} more" if len(rows) > 8 else "")
            raise FloatingPointError(
                f"the loss of step {first + offset} is {each['loss']}, its gradient's norm "
                f"{each['gradient_norm']} (seed {seed}; {shown}). Last good checkpoint: "
                f"{checkpoint.latest(run)} in {run}. Lower optimizer.learning_rate or "
                f"optimizer.clip"
            )

    def line(self, step: int, record: dict[str, float]) -> str:
        """A record for people."""
        remaining = (self._last - step) / record["steps_per_second"]
        return (
            f"step {step:>{len(str(self._last))}}/{self._last}  loss {record['loss']:.4f}  "
            f"gradient {record['gradient_norm']:.3f}  lr {record['learning_rate']:.2e}  "
            f"{record['tokens_per_second']:,.0f} tokens/s  MFU {100 * record['mfu']:.1f} %  "
            f"{record['memory_bytes'] / 2**30:.2f} GiB  {_duration(remaining)} left"
        )


def _by_position(values: list[Any]) -> dict[str, float]:
    total = np.sum([each["error_total"] for each in values], axis=0)
    count = np.sum([each["error_count"] for each in values], axis=0)
    return {
        f"loss/{name}": float(total[i] / count[i])
        for i, name in enumerate(objective.POSITIONS)
        if count[i]
    }


def _by_trajectories(losses: list[tuple[int, float]]) -> dict[str, float]:
    by_n = defaultdict(list)
    for n, loss in losses:
        by_n[n].append(loss)
    return {f"loss/n={n}": float(np.mean(found)) for n, found in sorted(by_n.items())}


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
