import dataclasses
from pathlib import Path

import pytest

from agent.config import MeshConfig, ModelConfig, TrainConfig
from agent.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sound_and_survive_json(name):
    config = PRESETS[name].config(run=Path("r"), store=Path("s"), tasks=("cheetah_run",))
    config.check()
    assert TrainConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ModelConfig(width=30, heads=4)}, r"model\.width=30 .* use a width of 16"),
        ({"model": ModelConfig(chunk=0)}, r"model\.chunk=0 must be positive"),
        ({"mesh": MeshConfig(tensor=3)}, r"mesh\.tensor=3"),
        (
            {"mesh": MeshConfig(ring=2), "model": ModelConfig(memory="bpt")},
            r"model\.memory=bpt .* mesh\.ring=2",
        ),
        ({"method": "dt"}, r"model\.packing=rsa, not step"),
        ({"model": ModelConfig(packing="rsa")}, "needs a reward token"),
        ({"method": "bc", "mesh": MeshConfig(data=2)}, "one device"),
        ({"method": "bc", "tasks": ("cheetah_run", "cheetah_run_backward")}, "one task"),
        ({"model": ModelConfig(dropout=1.0)}, r"model\.dropout=1\.0 must lie in"),
        ({"method": "bc", "model": ModelConfig(dropout=0.1)}, "no residual branches to drop from"),
        ({"data": {"top": 0.0}}, r"data\.top=0\.0 must lie in"),
    ],
)
def test_settings_that_cannot_work_are_refused_early(config, changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes).check()


def test_configs_are_frozen(config):
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().seed = 3
