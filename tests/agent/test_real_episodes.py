"""Recorded walker episodes pack, relabel and train; found through EXORING_REAL_EPISODES."""

import dataclasses
import json
import os

import numpy as np
import pytest

import exorl
from agent import training
from agent.config import MeshConfig
from agent.presets import PRESETS

FOLDER = os.environ.get("EXORING_REAL_EPISODES")


@pytest.mark.real
@pytest.mark.skipif(FOLDER is None, reason="EXORING_REAL_EPISODES is not set")
def test_real_episodes_pack_relabel_and_train(tmp_path):
    store = exorl.pack([FOLDER or ""], tmp_path / "store", domain="walker")
    tiny = PRESETS["tiny"].config(
        run=tmp_path / "run", store=store.path, tasks=("walker_run", "walker_walk")
    )
    tiny = dataclasses.replace(tiny, mesh=MeshConfig(data=2, ring=4), log_every=10)
    assert tiny.optimizer.steps == 20
    training.train(tiny)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 2 and np.isfinite(losses).all() and losses[1] < losses[0]
