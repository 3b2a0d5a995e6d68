"""A plan agrees with what there is: shapes, bytes, messages, lines of the model."""

import dataclasses
from pathlib import Path

import jax
import pytest

import scripts.plan
from agent import ahead, cache, estimate, networks, plan, sharding, suggest
from agent.config import DataConfig, MeshConfig, ModelConfig, TrainConfig
from agent.presets import PRESETS
from agent.sharding import make_mesh
from ring import targets

CPU = targets.parse("cpu:8")
# Ten steps a trajectory.
SMALL = ModelConfig(packing="rsar", chunk=100, layers=2, width=16, heads=2, block_size=32)


def run(
    model: ModelConfig = SMALL, mesh: MeshConfig | None = None, tasks=("cheetah_run",), **changes
) -> TrainConfig:
    data = DataConfig(store=Path("none"), tasks=tasks, trajectories=4, batch_tokens=1)
    made = TrainConfig(Path("none"), data, model=model, mesh=mesh or MeshConfig(data=2, ring=4))
    return dataclasses.replace(made, **changes)


@pytest.fixture(scope="module")
def planned() -> plan.Plan:
    return plan.plan(run(), CPU, explain=True)


def test_the_batch_is_the_largest_that_training_draws(planned):
    assert (planned.rows, planned.steps) == (2, 40)
    assert planned.block == 40
    for preset, shape in {
        "at_ring_128": (1, 128_000),
        "at_paper": (64, 4_000),
        "at_step_128": (1, 128_000),
        "dt": (64, 20),
        "bc": (1024, 1),
    }.items():
        config = PRESETS[preset].config(run=Path("r"), store=Path("s"), tasks=("walker_run",))
        assert ahead.batch_shape(config) == shape
    odd = run(mesh=MeshConfig(ring=4), model=dataclasses.replace(SMALL, chunk=93))  # 11 steps
    odd = dataclasses.replace(odd, data=dataclasses.replace(odd.data, trajectories=3))
    assert ahead.batch_shape(odd) == (1, 40)


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, (2, 64_000)),  # 512,000 tokens by two chains of 64, 288,000 by one of 72
        ({"fixed": True}, (1, 72_000)),
        ({"trajectories": 80}, (2, 64_000)),
        ({"trajectories": 64}, (2, 64_000)),
    ],
)
def test_the_largest_batch_need_not_have_the_longest_chains(changes, shape):
    config = PRESETS["at_ring_128"].config(run=Path("r"), store=Path("s"), tasks=("walker_run",))
    data = dataclasses.replace(config.data, **{"trajectories": 72, **changes})
    config = dataclasses.replace(config, data=data, mesh=MeshConfig())
    assert ahead.batch_shape(config) == shape
    scores = dataclasses.replace(config.model, memory="plain")  # B · S²: 8.2 against 5.2 · 10⁹
    assert ahead.batch_shape(dataclasses.replace(config, model=scores)) == shape


def test_a_sequence_that_no_order_counts_is_refused():
    config = run(data=dataclasses.replace(run().data, trajectories=10**8))
    with pytest.raises(ValueError, match="trajectories=100000000 make a sequence of 4,000,000,000"):
        ahead.batch_shape(config)


def test_shapes_are_those_of_a_sampler(config, cheetah_store):
    from data.pool import Pool

    for made in (config(method="bc"), config(method="dt", model=ModelConfig(packing="rsa"))):
        pool = Pool.load(cheetah_store, made.data.tasks, made.data.holdout)
        sampler = networks.sampler(made, pool, pool.normalizer())
        assert ahead.batch_shape(made) == sampler.shape(0, 0)


def test_counted_bytes_of_operands_are_exactly_the_compilers(planned):
    counted, program = planned.counted, planned.program
    assert isinstance(program, ahead.Compiled)
    assert counted.parameters == 4 * planned.parameters  # all too small to be split
    assert counted.moments == 2 * counted.parameters + 3 * 4  # two counts and the step
    # The compiler is not handed what the packing does not read.
    rows, steps, actions = 1, 10, 100 * 6
    unread = rows * steps * 4 * (actions + 4)  # previous_*, completion, chain
    assert program.arguments == counted.arguments - unread


def test_large_parameters_are_counted_in_shards():
    wide = run(model=dataclasses.replace(SMALL, width=256))
    mesh = make_mesh(wide.mesh)
    counted = estimate.bytes_of(wide, mesh, 2, 40)
    whole = 4 * networks.parameter_count(wide, mesh)
    assert whole / 4 < counted.parameters == counted.gradients < whole / 2


def test_totals_and_verdict(planned):
    assert planned.total == planned.program.total + 2 * planned.counted.batch
    assert planned.fits and planned.total < planned.available == plan.available(CPU)
    assert plan.available(targets.parse("h200:8")) == int(0.92 * 150e9)
    little = dataclasses.replace(planned, available=planned.total - 1)
    assert not little.fits


def test_the_evaluation_cache_is_as_large_as_the_cache(planned):
    config = planned.config
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        made = cache.empty(
            mesh,
            layers=2,
            batch=2,
            rows=cache.capacity(40, 4, mesh.shape["ring"]),
            heads=2,
            head_dim=8,
            dtype="float32",
            segmented=False,
        )
    assert planned.caches["float32"] == sharding.shard_bytes((made.key, made.value))
    assert planned.caches["bfloat16"] * 2 == planned.caches["float32"]


def test_messages_are_those_of_the_ring(planned):
    permutes = planned.collectives["collective-permute"]
    keys_and_values = 2 * 4 * 40 * 16
    assert max(each.message for each in permutes) == keys_and_values
    assert not any(each.asynchronous for each in permutes)  # a CPU has no such messages
    assert planned.in_flight == keys_and_values and not plan.overlaps(planned.collectives)
    assert planned.seconds.exposed == planned.seconds.transfer == 0  # no link is known
    assert planned.minimum_block is None


def test_the_largest_buffers_come_from_lines_of_ours(planned):
    sizes = [each.size for each in planned.buffers]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 1000
    assert {each.kind for each in planned.buffers} <= {"temporary", "argument", "output"}
    lines = [each.line for each in planned.buffers]
    assert sum(line.startswith(("agent/", "ring/")) for line in lines) >= len(lines) / 2
    assert any("model.py" in line for line in lines)


def test_buffers_are_those_of_a_program_that_was_compiled_before(planned):
    """Though JAX's cache on disk, which tests have, would spare compiling it again."""
    again = plan.plan(run(), CPU, explain=True)
    assert jax.config.jax_enable_compilation_cache
    assert [each.size for each in again.buffers] == [each.size for each in planned.buffers]
    assert again.buffers


def test_operations_add_up():
    config = PRESETS["at_ring_128"].config(run=Path("r"), store=Path("s"), tasks=("walker_run",))
    layers, width, length = 24, 1024, 512_000
    work = estimate.operations(config, 0, 1, 128_000)
    assert work.attention == layers * 7 * length**2 * width  # 3.5 · ½ · 4 T² E
    # Thrice forward, backward counting twice, and all but the last product of a block once more.
    assert work.other == pytest.approx(layers * (3 * 24 + 16) * length * width**2)
    apart = dataclasses.replace(
        config, model=dataclasses.replace(config.model, cross_episode=False)
    )
    within = estimate.operations(apart, 0, 1, 128_000)
    assert within.attention == work.attention / 128 and within.other == work.other
    plain = dataclasses.replace(config, model=dataclasses.replace(config.model, memory="plain"))
    assert estimate.operations(plain, 0, 1, 128_000).attention == 2 * work.attention


def test_hidden_messages_cost_what_products_do_not_hide():
    config = PRESETS["at_ring_128"].config(run=Path("r"), store=Path("s"), tasks=("walker_run",))
    work = estimate.operations(config, 0, 1, 128_000)
    none = estimate.Bytes(0, 0, 0, 0, 0, 0, 0)
    given = dict(rows=1, steps=128_000, flops_per_second=4e14)
    fast = estimate.step_time(config, work, none, link=lambda _: 4.5e11, hidden=True, **given)
    home = 24 * 64_000 * 1024 * 8 / 4.5e11  # float32 gradients of keys and values, once a layer
    assert fast.exposed == pytest.approx(home)
    assert fast.total == pytest.approx((work.attention + work.other) / 8 / 4e14 + home)
    shown = estimate.step_time(config, work, none, link=lambda _: 4.5e11, hidden=False, **given)
    assert shown.exposed == shown.transfer > 10 * home
    slow = estimate.step_time(config, work, none, link=lambda _: 4.5e8, hidden=True, **given)
    assert slow.exposed == pytest.approx(slow.transfer - slow.attention)


@pytest.mark.parametrize(("trajectories", "hops"), [(8, 0), (16, 0), (6, 1), (2, 3), (1, 7)])
def test_keys_of_trajectories_that_are_apart_travel_no_farther_than_these(trajectories, hops):
    """48 steps on 8 devices, six on each."""
    model = dataclasses.replace(SMALL, chunk=-(-1000 // (48 // trajectories)), cross_episode=False)
    config = run(model=model, mesh=MeshConfig(ring=8))
    assert estimate._hops(config, 48) == hops
    whole = dataclasses.replace(model, cross_episode=True)
    assert estimate._hops(dataclasses.replace(config, model=whole), 48) == 7


def test_every_axis_has_its_messages():
    """Two layers of width 16 in float32, one sequence of 1,000 tokens a data shard, 1 byte/s."""
    bytes_ = estimate.Bytes(4000, 0, 0, 0, 0, 0, 0)
    links = []

    def seconds(mesh: MeshConfig, parts: int = 1) -> estimate.StepTime:
        optimizer = dataclasses.replace(run().optimizer, accumulation=parts)
        config = run(mesh=mesh, optimizer=optimizer)
        given = dict(rows=mesh.data * mesh.fsdp, steps=250, flops_per_second=1.0, hidden=False)
        work = estimate.operations(config, 0, given["rows"], 250)
        links.clear()
        return estimate.step_time(
            config, work, bytes_, link=lambda size: links.append(size) or 1.0, **given
        )

    alone = seconds(MeshConfig())
    assert alone.transfer == alone.partial == alone.parameters == 0
    assert seconds(MeshConfig(data=4)).parameters == 2 * 3 / 4 * 4000  # summed
    assert seconds(MeshConfig(fsdp=4)).parameters == 3 * 3 * 4000  # gathered twice, summed in parts
    assert seconds(MeshConfig(fsdp=4), parts=8).parameters == 8 * 3 * 3 * 4000
    assert seconds(MeshConfig(tensor=2)).partial == 5 * 2 * 1 / 2 * 2 * 1000 * 16 * 4
    assert seconds(MeshConfig(data=2, fsdp=2, ring=4, tensor=2)) and set(links) == {2, 8, 16, 32}


@pytest.mark.parametrize(
    ("preset", "target", "mesh"),
    [
        ("at_ring_128", "h200:8", MeshConfig(ring=8)),  # its own
        ("at_ring_128", "v5e:4x8", MeshConfig(ring=32)),
        ("at_small_128", "cpu:8", MeshConfig(ring=8)),
        ("at_step", "h200:256", MeshConfig(data=8, ring=32)),  # 62 blocks: 32 divides 256
        ("at_bpt_32", "h200:8", MeshConfig(data=8)),
        ("bc", "v5e:2x4", MeshConfig(data=8)),
    ],
)
def test_meshes_fill_their_target(preset, target, mesh):
    config = PRESETS[preset].config(run=Path("r"), store=Path("s"), tasks=("walker_run",))
    filled = plan.filled(config, targets.parse(target))
    assert filled.mesh == mesh
    filled.check()


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ValueError, match="ring 4 × tensor 1 has 4 devices, cpu:8 has 8"):
        plan.plan(run(mesh=MeshConfig(ring=4)), CPU)


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        ("memory required for HLO temporaries (100.50G) exceeds available HBM (15.75G).", 100.5),
        ("Ran out of memory in memory space hbm. Used 256.75G of 15.75G hbm.", 256.75),
        ("no number", None),
    ],
)
def test_refusals_are_read(message, needed):
    assert ahead._needed(message) == (None if needed is None else int(needed * 2**30))


PLAIN = dataclasses.replace(SMALL, memory="plain")


def test_changes_are_tried_one_at_a_time(planned):
    alone = run(model=PLAIN, mesh=MeshConfig(data=8))
    changes = list(suggest.changes(dataclasses.replace(planned, config=alone, rows=8)))
    assert [change.words(alone, CPU) for change in changes] == [
        "--model.memory bpt",
        "--model.memory ring --mesh.data 1 --mesh.ring 8",
        "--model.dtype bfloat16, which halves the evaluation cache too",
        "--model.packing step, 4 times fewer tokens",
        "--data.trajectories 2",
        "--data.trajectories 1",
    ]
    # Shorter chains are not made up for by more of them.
    assert {ahead.batch_shape(change.config)[0] for change in changes} == {8, 1}
    hopeless = dataclasses.replace(planned, available=1)
    assert not list(suggest.suggestions(hopeless, 0.5))


@pytest.mark.parametrize(
    ("preset", "target", "options"),
    [
        ("at_bpt_32", "h200:8", "--mesh.fsdp 8"),
        ("at_ring_128", "v5e:2x2", ""),
        ("at_small_128", "v5e:16x16", ""),
        ("demo", "cpu:8", "--data.multiple 2"),
        ("at_paper", "a100-80:16", ""),
        ("dt", "h200:1", ""),
    ],
)
def test_flags_of_a_change_ask_for_what_was_compiled(planned, preset, target, options):
    asked = scripts.plan.parse([preset, "--target", target, *options.split()])
    meant = scripts.plan.meant([*options.split()], asked)
    refused = dataclasses.replace(
        planned, config=meant, target=targets.parse(target), rows=ahead.batch_shape(meant)[0]
    )
    changes = [change for change in suggest.changes(refused) if suggest._possible(change)]
    assert changes
    for change in changes:
        flags = change.words(asked.config, refused.target).partition(",")[0].split()
        again = [preset, "--target", target, *options.split(), *flags]
        request = scripts.plan.parse(again)
        assert targets.parse(request.target) == change.target
        assert scripts.plan.meant(again, request) == change.config


@pytest.mark.slow
def test_suggestions_are_compiled():
    refused = plan.plan(run(model=PLAIN, mesh=MeshConfig(data=8)), CPU)
    refused = dataclasses.replace(refused, available=refused.total - 1)
    change, made = next(suggest.suggestions(refused, 0.5))
    assert (
        change.words(refused.config, CPU) == "--model.memory bpt"
        and made.config.model.memory == "bpt"
    )
    assert made.fits and made.total < refused.total


@pytest.mark.parametrize(
    "name",
    ["v5e:2x4", pytest.param("h200:8", marks=pytest.mark.slow)],
)
def test_an_accelerators_compiler_plans(name):
    """Messages are asynchronous, and its memory is what counts."""
    target = targets.parse(name)
    if not targets.installed(target.platform):
        pytest.skip(f"nothing compiles for {name} here; plan-tpu and plan-gpu would")
    made = plan.plan(run(mesh=MeshConfig(ring=8)), target, explain=True)
    assert made.fits and made.total > made.counted.parameters
    *rest, last = made.collectives["collective-permute"]
    assert rest and all(each.asynchronous for each in rest)
    # XLA:GPU waits for the last where it is small, as nothing is left to hide it.
    assert last.asynchronous or (target.platform, last.message) == ("cuda", 3072)
    assert made.minimum_block and made.minimum_block > made.block
    assert made.buffers


@pytest.mark.slow
def test_a_tpus_compiler_refuses_what_does_not_fit():
    if not targets.installed("tpu"):
        pytest.skip("needs plan-tpu")
    model = dataclasses.replace(SMALL, chunk=1, layers=1, memory="plain")
    made = plan.plan(run(model=model, mesh=MeshConfig()), targets.parse("v5e:1x1"))
    many = run(model=model, mesh=MeshConfig())
    many = dataclasses.replace(many, data=dataclasses.replace(many.data, trajectories=32))
    refused = plan.plan(many, targets.parse("v5e:1x1"), explain=True)
    assert made.fits and not refused.fits
    assert isinstance(refused.program, ahead.Refused) and "Ran out of memory" in (
        refused.program.message
    )
    assert refused.total and refused.total > refused.available
    assert "f32[" in refused.buffers[0].shape
