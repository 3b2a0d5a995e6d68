from collections.abc import Callable
from pathlib import Path

import pytest

import exorl
from agent.config import DataConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainConfig

RUN, BACK = "cheetah_run", "cheetah_run_backward"


@pytest.fixture
def config(cheetah_store: exorl.EpisodeStore, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Makes small training runs on the short cheetah episodes; keywords replace whole groups."""

    def make(
        *,
        tasks: tuple[str, ...] = (RUN,),
        model: ModelConfig | None = None,
        mesh: MeshConfig | None = None,
        data: dict | None = None,
        steps: int = 4,
        learning_rate: float = 1e-2,
        optimizer: dict | None = None,
        **changes,
    ) -> TrainConfig:
        return TrainConfig(
            run=changes.pop("run", tmp_path / "run"),
            data=DataConfig(
                tasks=tasks,
                **{
                    "store": cheetah_store.path,
                    "trajectories": 3,
                    "batch_tokens": 100,
                    **(data or {}),
                },
            ),
            model=model or ModelConfig(chunk=8, layers=2, width=16, heads=2),
            optimizer=OptimizerConfig(
                **{"steps": steps, "learning_rate": learning_rate, "warmup": 2, **(optimizer or {})}
            ),
            mesh=mesh or MeshConfig(),
            **{"log_every": 2, "checkpoint_every": 1_000, **changes},
        )

    return make
