"""A step is the same on every mesh, and its activations stay where they are."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from agent import ahead, checkpoint, networks, training
from agent.config import MeshConfig, ModelConfig, TrainConfig
from agent.sharding import compiler_options, make_mesh, parameter_spec
from data.pool import Pool
from data.sampling import placed
from exorl import EpisodeStore
from ring import make_mesh as ring_mesh
from ring import targets

BOTH = ("cheetah_run", "cheetah_run_backward")
WIDE = ModelConfig(chunk=8, layers=2, width=256, heads=2, dropout=0.2)


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


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_bpt_and_ring_train_alike(config, dropout):
    """The same losses within 1e-4 over the first 20 steps, on one device and around a ring."""
    model = ModelConfig(chunk=8, layers=2, width=16, heads=2, dropout=dropout)
    two = {"fixed": True, "batch_tokens": 66, "multiple": 2}
    ring = config(tasks=BOTH, mesh=MeshConfig(data=2, ring=4), data=two, model=model)
    bpt = dataclasses.replace(
        ring, mesh=MeshConfig(), model=dataclasses.replace(ring.model, memory="bpt")
    )
    np.testing.assert_allclose(losses(ring, 20), losses(bpt, 20), atol=1e-4)


@pytest.mark.parametrize(
    ("mesh", "accumulation"),
    [
        pytest.param(MeshConfig(fsdp=2, ring=4), 1, marks=pytest.mark.slow),
        (MeshConfig(data=2, ring=2, tensor=2), 2),
        pytest.param(MeshConfig(), 4, marks=pytest.mark.slow),
    ],
)
def test_meshes_and_parts_of_a_batch_change_nothing_but_rounding(config, mesh, accumulation):
    """A wide network with dropout, whose parameters and moments are split over devices; and bpt."""
    data = {"fixed": True, "batch_tokens": 132, "multiple": 4}
    bpt = dataclasses.replace(WIDE, memory="bpt")
    whole = config(model=bpt, data=data, learning_rate=1e-3)
    split = dataclasses.replace(
        whole,
        mesh=mesh,
        model=WIDE,
        optimizer=dataclasses.replace(whole.optimizer, accumulation=accumulation),
    )
    if mesh.fsdp * mesh.ring > 1:
        state = checkpoint.abstract_state(split, make_mesh(mesh))
        specs = [
            leaf.sharding.spec for leaf in jax.tree.leaves((state.parameters, state.optimizer))
        ]
        assert sum(("fsdp", "ring") in spec for spec in specs) >= 12
    np.testing.assert_allclose(losses(split, 3), losses(whole, 3), rtol=2e-6)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(MeshConfig(data=2, ring=4), marks=pytest.mark.slow),
        MeshConfig(data=2, ring=2, tensor=2),
        pytest.param(MeshConfig(data=2, fsdp=2, ring=2), marks=pytest.mark.slow),
    ],
)
def test_activations_never_leave_their_device_but_as_keys_and_values(config, mesh):
    """The compiled step permutes; what it gathers are parameters, of a layer at a time."""
    made = config(model=WIDE, tasks=BOTH, mesh=mesh, data={"fixed": True, "multiple": 4})
    text = compiled_step(made, chains=4, steps=4 * 40).as_text()
    assert text.count(" collective-permute(") > 0
    assert " all-to-all(" not in text
    gathered = re.findall(r"= \(?f32\[([\d,]+)\][^=]*? all-gather(?:-start)?\(", text)
    shapes = {tuple(int(size) for size in each.split(",")) for each in gathered}
    # No parameter has an extent of 160 steps or 40 a device, and no activation has none.
    assert all(160 not in shape and 40 not in shape and 80 not in shape for shape in shapes), shapes
    parameters = {256 * 256, 256 * 768, 256 * 1024, 128 * 256, 128 * 768, 512 * 256}
    assert {int(np.prod(shape)) for shape in shapes} <= parameters, shapes


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "steps", "rings"), [("cpu", 1000, (2, 4, 8)), ("v5e:2x4", 4000, (4, 8))]
)
def test_a_device_needs_as_much_when_chain_and_ring_grow_together(config, target, steps, rings):
    """Activation bytes a device within 10 %, with four tokens to each of a device's steps.

    A ring of 2 makes one hop, whose buffers a TPU's compiler saves: docs/scaling.md.
    """
    platform = target.partition(":")[0]
    if platform != "cpu" and not targets.installed("tpu"):
        pytest.skip(f"nothing compiles for {target} here; plan-tpu would")
    devices = jax.devices() if platform == "cpu" else targets.devices(target)
    model = ModelConfig(packing="rsar", layers=2, width=128, heads=1)
    found = []
    for size in rings:
        made = config(model=model, mesh=MeshConfig(ring=size), data={"trajectories": 32})
        mesh = ring_mesh(ring=size, devices=devices[:size])
        compiled = compiled_step(made, chains=1, steps=steps * size, mesh=mesh)
        found.append(compiled.memory_analysis().temp_size_in_bytes)
    assert max(found) <= 1.1 * min(found), found


def compiled_step(config: TrainConfig, *, chains: int, steps: int, mesh=None):
    """The compiled train step for a batch of some shape, from shapes alone."""
    return ahead.lower_step(config, mesh or make_mesh(config.mesh), chains, steps).compile()


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_programs_carry_the_options_of_their_platform(platform):
    """On GPUs those under which a ring's messages hide, so that a plan is of what training runs."""
    device = SimpleNamespace(platform=platform)
    options = compiler_options(SimpleNamespace(devices=np.array([device])))
    assert (
        options
        == {
            "cpu": {"xla_cpu_prefer_vector_width": 512},
            "gpu": targets.compiler_options("gpu"),
            "tpu": None,
        }[platform]
    )


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
