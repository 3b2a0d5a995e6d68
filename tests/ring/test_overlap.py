"""Messages of a ring travel while it computes: read off programs compiled for TPUs and GPUs."""

import re

import pytest

from ring import schedule, targets
from scripts.bench import overlap

# Programs as compilers write them, with fewer words. On a TPU products are convolutions in fusions,
# in loops; here two messages hide behind one loop.
TPU = """\
HloModule jit_attention, is_scheduled=true, entry_computation_layout={()->bf16[8,128]}

%fused.7 (param_0.1: bf16[4,128]) -> f32[4,4] {
  %param_0.1 = bf16[4,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %convolution.1 = f32[4,4]{1,0} convolution(%param_0.1, %param_0.1), dim_labels=bf_oi->bf
}

%body.1 (param.2: (s32[], bf16[4,128], /*index=2*/f32[4,4])) -> (s32[], f32[4,4]) {
  %param.2 = (s32[], bf16[4,128]{1,0}, /*index=2*/f32[4,4]{1,0}) parameter(0)
  %get-tuple-element.3 = bf16[4,128]{1,0} get-tuple-element(%param.2), index=1
  %fusion.1 = f32[4,4]{1,0} fusion(%get-tuple-element.3), kind=kOutput, calls=%fused.7
  %fusion.2 = f32[4,4]{1,0} fusion(%get-tuple-element.3), kind=kOutput, calls=%fused.7
  ROOT %tuple.1 = (s32[]{:T(128)}, f32[4,4]{1,0}) tuple(%get-tuple-element.3, %fusion.2)
}

%condition.1 (param.4: (s32[], f32[4,4])) -> pred[] {
  %param.4 = (s32[], f32[4,4]{1,0}) parameter(0)
  ROOT %compare.1 = pred[] compare(%param.4, %param.4), direction=LT
}

ENTRY %main.9 (k.1: bf16[8,128], order.1: s32[2048]) -> bf16[8,128] {
  %k.1 = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %s.1 = (s32[2048]{0:T(1024)S(1)}, u32[]{:S(2)}) collective-permute-start(%order.1), channel_id=1
  %s = (bf16[8,128]{1,0}, bf16[8,128]{1,0}, u32[]{:S(2)}) collective-permute-start(%k.1)
  %while.5 = (s32[]{:T(128)}, f32[4,4]{1,0}) while(%k.1), condition=%condition.1, body=%body.1
  %copy.1 = f32[4,4]{1,0} copy(%k.1), metadata={op_name="jit(attention)/while/body/add"}
  %done = bf16[8,128]{1,0} collective-permute-done(%s)
  ROOT %done.1 = s32[2048]{0} collective-permute-done((s32[2048], u32[]) %s.1)
}
"""

# On GPUs one message can be of two arrays. Products are in a branch and in a library. A pair that
# is run synchronously follows, and a permute that was never split.
GPU = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%gemm_computation (parameter_0: bf16[4,128]) -> f32[4,4] {
  %parameter_0 = bf16[4,128]{1,0} parameter(0)
  ROOT %dot.1 = f32[4,4]{1,0} dot(%parameter_0, %parameter_0), rhs_contracting_dims={1}
}

%branch.1 (arg: bf16[4,128]) -> f32[4,4] {
  %arg = bf16[4,128]{1,0} parameter(0)
  ROOT %gemm_fusion.1 = f32[4,4]{1,0} fusion(%arg), kind=kCustom, calls=%gemm_computation
}

%branch.2 (arg: bf16[4,128]) -> f32[4,4] {
  ROOT %gemm = (f32[4,4]{1,0}, s8[9]{0}) custom-call(%arg), custom_call_target="__cublas$gemm"
}

ENTRY %main (k: bf16[8,128], order: s32[16]) -> bf16[8,128] {
  %k = bf16[8,128]{1,0} parameter(0)
  %s = ((bf16[8,128]{1,0}), s32[16]{0}) collective-permute-start(%k, %o), config={"is_sync":false}
  %if = f32[4,4]{1,0} conditional(%p, %k, %k), branch_computations={%branch.1, %branch.2}
  %done = (bf16[8,128]{1,0}, s32[16]{0}) collective-permute-done(%s)
  %s.1 = (f32[8]{0}, f32[8]{0}) collective-permute-start(%x), config={"is_sync":true}
  %gemm_fusion.2 = f32[4,4]{1,0} fusion(%k), kind=kCustom, calls=%gemm_computation
  %done.1 = f32[8]{0} collective-permute-done(%s.1)
  ROOT %ppermute.2 = u32[]{} collective-permute(%x), channel_id=3
}
"""


# XLA:TPU starts a gather in one fusion, goes on with it in others, and ends it in a last one.
FUSED = """\
HloModule jit_f, is_scheduled=true

%started (p.1: bf16[1,512]) -> (bf16[1,512], bf16[1,4096]) {
  %p.1 = bf16[1,512]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[1,4096]{1,0} all-gather(%p.1), channel_id=5, dimensions={1}
}

%going_on (p.2: bf16[1,512]) -> f32[4,4] {
  %p.2 = bf16[1,512]{1,0} parameter(0)
  %all-gather.2 = bf16[1,4096]{1,0} all-gather(%p.2), channel_id=5, dimensions={1}
  ROOT %convolution.1 = f32[4,4]{1,0} convolution(%p.2, %p.2), dim_labels=bf_oi->bf
}

%ended (p.3: bf16[1,512]) -> bf16[1,4096] {
  %p.3 = bf16[1,512]{1,0} parameter(0)
  ROOT %all-gather.3 = bf16[1,4096]{1,0} all-gather(%p.3), channel_id=5, dimensions={1}
}

ENTRY %main (k: bf16[1,512]) -> bf16[1,4096] {
  %k = bf16[1,512]{1,0} parameter(0)
  %async-collective-start.2 = (bf16[1,512]{1,0}, bf16[1,4096]{1,0}) fusion(%k), calls=%started
  %fusion.1 = f32[4,4]{1,0} fusion(%k), kind=kOutput, calls=%going_on
  %async-collective-done.2 = bf16[1,4096]{1,0} fusion(%k), calls=%ended
  %all-reduce.1 = f32[6]{0} all-reduce(%k), channel_id=6, to_apply=%started
  ROOT %all-gather.4 = bf16[1,4096]{1,0} all-gather(%k), channel_id=7, dimensions={1}
}
"""


def test_other_collectives_are_found_once():
    found = schedule.collectives(FUSED)
    assert set(found) == {"all-gather", "all-reduce"}
    fused, whole = found["all-gather"]
    assert fused == ("async-collective-start.2", 2 * 4096, True, 1, 0, 1) and fused.hidden
    assert whole == ("all-gather.4", 2 * 4096, False, 0, 0, 0)
    assert found["all-reduce"] == [("all-reduce.1", 4 * 6, False, 0, 0, 0)]
    assert schedule.in_flight(FUSED) == 0


def test_messages_that_travel_together_are_added_up():
    assert schedule.in_flight(TPU) == 2 * 8 * 128 + 4 * 2048
    assert schedule.in_flight(GPU) == 2 * 8 * 128 + 4 * 16  # the others come after it


def test_a_schedule_tells_what_hides_a_message():
    tokens, keys = schedule.permutes(TPU)
    assert keys == ("s", 2 * 8 * 128, True, 2, 1, 2)
    assert tokens == ("s.1", 4 * 2048, True, 4, 1, 2)
    assert keys.hidden and tokens.hidden


def test_a_permute_that_is_not_asynchronous_hides_behind_nothing():
    together, pair, whole = schedule.permutes(GPU)
    assert together == ("s", 2 * 8 * 128 + 4 * 16, True, 1, 0, 2)
    assert pair == ("s.1", 4 * 8, False, 0, 0, 0)
    assert whole == ("ppermute.2", 4, False, 0, 0, 0)
    assert [permute.hidden for permute in (together, pair, whole)] == [True, False, False]


def test_work_before_the_start_hides_nothing():
    loop = next(line for line in TPU.splitlines(keepends=True) if "%while.5 =" in line)
    late = TPU.replace(loop, "").replace("  %s.1 =", f"{loop}  %s.1 =")
    for permute in schedule.permutes(late):
        assert permute.asynchronous and permute.instructions and not permute.hidden


def test_texts_that_are_no_schedule_are_refused():
    with pytest.raises(ValueError, match="not scheduled"):
        schedule.permutes(TPU.replace("is_scheduled=true, ", ""))
    with pytest.raises(ValueError, match=r"starts s\.1 and never waits"):
        schedule.permutes(TPU.replace("%s.1)", "%another)"))


def compiled(name, tokens=2048, heads=4):
    """Texts of the forward, and of the forward and backward pass, in bfloat16 on a ring."""
    target = targets.parse(name)
    shape = (1, tokens * target.size, heads, 128)
    if not targets.installed(target.platform):
        pytest.skip(f"nothing compiles for {name} here; plan-tpu and plan-gpu would")
    return [compiler().as_text() for _, compiler in overlap.passes(target, shape, "bfloat16", 512)]


def check(texts, message):
    """Products hide all messages but the last, `message` bytes, which takes gradients home."""
    forward, both = map(schedule.permutes, texts)
    for permute in forward:
        assert permute.asynchronous and permute.loops and permute.products >= 2, permute
    *hidden, home = both
    for permute in hidden:
        assert permute.asynchronous and permute.loops and permute.products >= 2, permute
    assert sum(permute.products >= 5 for permute in hidden) >= 2  # in and after the backward loop
    assert (home.message, home.products) == (message, 0)
    for text in texts:
        assert set(re.findall(r" (?:all-|reduce-scatter|ragged)[a-z-]+\(", text)) == set()


@pytest.mark.parametrize("name", ["v5e:2x4", "a100-80:8", "h200:8"])
def test_messages_hide_behind_products(name):
    check(compiled(name), message=2 * 4 * 2048 * 4 * 128)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["v4:1x2x2", "v4:2x2x2", "v5e:4x8", "v5p:4x4x4", "v6e:2x4", "a100-40:8", "h100:8"]
)
def test_messages_hide_behind_products_on_all_targets(name):
    check(compiled(name), message=2 * 4 * 2048 * 4 * 128)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:2x4", "a100-80:8", "h200:8"])
def test_large_messages_hide_too(name):
    """XLA:GPU would send keys and gradients of this size one after the other by default."""
    check(compiled(name, 16_384, 16), message=2 * 4 * 16384 * 16 * 128)


def test_the_benchmark_reports_a_target(capsys):
    options = "--targets cpu:8 --length 256 --heads 1 --head-dim 8 --block-size 16".split()
    overlap.main(options)
    versions, header, forward, both = capsys.readouterr().out.splitlines()
    assert versions.startswith("jax 0.") and header.startswith("target")
    # Permutes, asynchronous, hidden: on a CPU everything waits.
    assert re.match(r"cpu:8 +forward +[1-9] +0 +0 ", forward)
    assert re.match(r"cpu:8 +forward\+backward +[1-9] +0 +0 ", both)
