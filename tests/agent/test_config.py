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
        ({"method": "bc", "mesh": MeshConfig(ring=2)}, r"no sequence to shard, got mesh\.ring=2"),
        (
            {"model": ModelConfig(packing="rsar", reward_token=False)},
            r"model\.reward_token=False is for model\.packing=step",
        ),
        (
            {"model": ModelConfig(packing="rsar", completion=True)},
            r"model\.completion=True is for model\.packing=step",
        ),
        ({"data": {"multiple": 3}, "mesh": MeshConfig(data=2)}, r"data\.multiple=3 .* = 2"),
        ({"data": {"index_range": 2}}, r"data\.index_range=2 has too few .*trajectories=3"),
        (
            {"evaluate_rollouts": 3, "mesh": MeshConfig(data=2)},
            r"evaluate_rollouts=3 do not divide .* = 2; use 4",
        ),
        (
            {
                "evaluate_rollouts": 3,
                "evaluate_every": 1,
                "mesh": MeshConfig(fsdp=2),
                "method": "dt",
                "model": ModelConfig(packing="rsa"),
            },
            r"evaluate_rollouts=3 do not divide .* = 2; use 4",
        ),
        ({"evaluate_rollouts": 2}, r"evaluate_rollouts=2 .* there are none; set evaluate_every"),
        (
            {"evaluate_every": 2, "data": {"holdout": 0.0}},
            r"evaluate_every=2 .* data\.holdout=0 holds out none",
        ),
        (
            {"model": ModelConfig(packing="rsard", previous_action=True)},
            r"model\.previous_action=True is for model\.packing=step; .* token for the action",
        ),
        ({"tasks": ("cheetah_run", "cheetah_run")}, r"names a task twice"),
        ({"profile": True}, r"steps 10 to 14, .*optimizer\.steps=4 .* at least 15"),
        ({"evaluate_every": -1}, r"evaluate_every=-1 must not be negative"),
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
