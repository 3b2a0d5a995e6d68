"""Training: it learns, resumes bitwise, is the same on every mesh, and is really a ring."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from agent import checkpoint, networks, training
from agent.config import MeshConfig, ModelConfig, TrainConfig
from agent.sharding import make_mesh, parameter_spec
from data.pool import Pool
from data.sampling import placed
from exorl import EpisodeStore

BOTH = ("cheetah_run", "cheetah_run_backward")
CLONE = ModelConfig(chunk=1, width=16)  # the cheapest network, where any will do


def losses(config: TrainConfig, steps: int) -> list[float]:
    """Losses of the first steps, without writing anything."""
    pool = Pool.load(EpisodeStore(config.data.store), config.data.tasks, config.data.holdout)
    sampler, mesh = networks.sampler(config, pool, pool.normalizer()), make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        state, step = checkpoint.initial_state(config, mesh), training.make_step(config, mesh)
        found = []
        for i in range(steps):
            state, values = step(state, placed(sampler, mesh, config.seed, i))
            found.append(float(values["loss"]))
    return found


def saved(config: TrainConfig) -> list[np.ndarray]:
    mesh = make_mesh(config.mesh)
    agent = checkpoint.load(config.run, config, mesh)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(agent.parameters)]


@pytest.mark.parametrize(
    ("method", "model", "tasks"),
    [
        ("at", ModelConfig(chunk=8, layers=2, width=16, heads=2), BOTH),
        ("at", ModelConfig(packing="rsar", chunk=8, layers=1, width=16, heads=1), BOTH[:1]),
        ("dt", ModelConfig(packing="rsa", chunk=8, width=16, memory="plain"), BOTH[:1]),
        ("bc10", ModelConfig(chunk=1, width=16), BOTH[:1]),
    ],
)
def test_every_method_learns_and_leaves_a_whole_run(config, method, model, tasks):
    made = config(
        method=method, model=model, tasks=tasks, steps=30, data={"window": 5, "fixed": True}
    )
    training.train(made)
    lines = [json.loads(line) for line in (made.run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(2, 31, 2))
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert TrainConfig.from_json(json.loads((made.run / "config.json").read_text())) == (
        made.resolved()
    )
    assert any(path.name.startswith("events.out.tfevents") for path in made.run.iterdir())
    assert checkpoint.latest(made.run) == 30
    assert checkpoint.read_config(made.run) == made.resolved()


def test_resumed_equals_uninterrupted_bitwise(config, tmp_path, monkeypatch):
    straight = config(
        run=tmp_path / "straight",
        model=ModelConfig(chunk=8, layers=2, width=16, heads=2, dropout=0.1),
        steps=6,
        tasks=BOTH,
        data={"trajectories": 2},
        checkpoint_every=2,
    )
    training.train(straight)

    broken = dataclasses.replace(straight, run=tmp_path / "broken")
    batch = training.batches

    def dies_after_four(*args):
        for count, drawn in enumerate(batch(*args)):
            if count == 4:
                raise KeyboardInterrupt
            yield drawn

    monkeypatch.setattr(training, "batches", dies_after_four)
    with pytest.raises(KeyboardInterrupt):
        training.train(broken)
    monkeypatch.undo()
    assert checkpoint.latest(broken.run) == 4
    training.train(broken)
    assert checkpoint.latest(broken.run) == 6
    for left, right in zip(saved(straight), saved(broken), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_run_with_other_settings_is_refused_by_name(config):
    made = config(steps=2, method="bc", model=CLONE)
    training.train(made)
    changed = dataclasses.replace(made, seed=5)
    with pytest.raises(ValueError, match=r"other settings \(seed 0 → 5\)"):
        training.train(changed)


def test_an_incomplete_checkpoint_is_not_one(config):
    made = config(steps=2, method="bc", model=CLONE)
    training.train(made)
    (checkpoint.folder(made.run) / "9").mkdir()
    assert checkpoint.latest(made.run) == 2


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_bpt_and_ring_train_alike(config, dropout):
    """The same losses within 1e-4 over the first 20 steps, on one device and around a ring."""
    two_chains = {"fixed": True, "batch_tokens": 66}
    model = ModelConfig(chunk=8, layers=2, width=16, heads=2, dropout=dropout)
    ring = config(tasks=BOTH, mesh=MeshConfig(data=2, ring=4), data=two_chains, model=model)
    bpt = dataclasses.replace(
        ring, mesh=MeshConfig(), model=dataclasses.replace(ring.model, memory="bpt")
    )
    np.testing.assert_allclose(losses(ring, 20), losses(bpt, 20), atol=1e-4)


def test_parameters_sharded_over_fsdp_and_ring_train_alike(config):
    """A wide network whose parameters and moments are split over devices."""
    wide = ModelConfig(chunk=8, layers=1, width=256, heads=2)
    whole = config(model=wide, data={"fixed": True, "batch_tokens": 66})
    split = dataclasses.replace(whole, mesh=MeshConfig(fsdp=2, ring=4))
    mesh = make_mesh(split.mesh)
    state = checkpoint.abstract_state(split, mesh)
    shared = [leaf.sharding.spec for leaf in jax.tree.leaves(state.parameters)]
    assert any(("fsdp", "ring") in spec for spec in shared)
    np.testing.assert_allclose(losses(split, 3), losses(whole, 3), rtol=1e-5)


def test_the_compiled_step_is_a_ring(config):
    """Permutes, and no all-gather: activations never leave their device but as K/V blocks."""
    made = config(tasks=BOTH, mesh=MeshConfig(data=2, ring=4), data={"fixed": True})
    text = compiled_step(made, chains=2, steps=16).as_text()
    assert text.count(" collective-permute(") > 0
    assert not re.search(r" all-gather| all-to-all", text)


@pytest.mark.slow
def test_a_ring_of_eight_needs_a_quarter_of_bpts_memory(config):
    """Compiled temporary bytes a device at 32,768 tokens; bpt keeps the sequence whole."""
    model = ModelConfig(packing="rsar", chunk=1, layers=2, width=64, heads=2)
    ring = config(model=model, mesh=MeshConfig(ring=8))
    bpt = dataclasses.replace(
        ring, mesh=MeshConfig(), model=dataclasses.replace(model, memory="bpt")
    )
    bytes_of = [
        compiled_step(made, chains=1, steps=8192).memory_analysis().temp_size_in_bytes
        for made in (ring, bpt)
    ]
    assert bytes_of[0] <= bytes_of[1] / 4, bytes_of


def compiled_step(config: TrainConfig, *, chains: int, steps: int):
    """The compiled train step for a batch of some shape, from shapes alone."""
    from data.batches import Batch, sharding

    dims, mesh = networks.dimensions(config), make_mesh(config.mesh)
    sizes = {"observation": dims.observation, "action": dims.action, "previous_action": dims.action}
    flat = dict.fromkeys(("timestep", "trajectory", "order", "chain"), np.int32)
    flat["loss_mask"] = np.float32
    batch = Batch(
        **{
            name: jax.ShapeDtypeStruct(
                (chains, steps) if name in flat else (chains, steps, sizes.get(name, 1)),
                flat.get(name, np.float32),
                sharding=sharding(mesh),
            )
            for name in Batch._fields
        }
    )
    with jax.set_mesh(mesh):
        state = checkpoint.abstract_state(config, mesh)
        return training.make_step(config, mesh).lower(state, batch).compile()


def test_a_loss_that_is_not_finite_stops_the_run(config, monkeypatch):
    made = config(steps=4, method="bc", model=CLONE)
    errors = training.objective.action_errors
    poisoned = lambda *args: jax.tree.map(lambda x: x * np.nan, errors(*args))  # noqa: E731
    monkeypatch.setattr(training.objective, "action_errors", poisoned)
    said = r"step 0 is nan.* \(seed 0; window 0: episode .*Last good checkpoint: None in .*Lower"
    with pytest.raises(FloatingPointError, match=said):
        training.train(made)
    assert checkpoint.steps(made.run) == []  # nothing bad was saved


def test_large_parameters_are_sharded_and_small_ones_whole():
    mesh, P = make_mesh(MeshConfig(fsdp=2, ring=4)), jax.sharding.PartitionSpec
    spec = lambda *shape: parameter_spec(("head", "kernel"), shape, mesh)  # noqa: E731
    assert spec(256, 1024) == P(None, ("fsdp", "ring"))
    assert spec(1024, 65) == P(("fsdp", "ring"))
    assert spec(32, 32) == spec(257, 1023) == P()
    single = make_mesh(MeshConfig())
    assert parameter_spec(("head", "kernel"), (256, 1024), single) == P()


def test_layers_are_never_split_and_heads_and_hidden_units_over_tensor():
    mesh, P = make_mesh(MeshConfig(fsdp=2, ring=2, tensor=2)), jax.sharding.PartitionSpec
    shards = ("fsdp", "ring")
    for path, shape, stored, computed in (
        ("query_key_value kernel", (64, 32, 3, 4, 16), P(None, shards, None, "tensor"), None),
        ("project kernel", (64, 4, 16, 32), P(None, "tensor", None, shards), P(None, "tensor")),
        ("expand kernel", (64, 32, 128), P(None, shards, "tensor"), None),
        ("contract kernel", (64, 128, 32), P(None, "tensor", shards), None),
        ("expand bias", (2, 128), P(None, "tensor"), None),
        ("attention_norm scale", (2, 32), P(), None),
    ):
        names = ("blocks", *path.split(), "value")
        assert parameter_spec(names, shape, mesh) == stored, path
        if computed:
            assert parameter_spec(names, shape, mesh, stored=False) == computed
