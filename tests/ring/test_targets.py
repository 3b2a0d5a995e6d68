"""Devices to compile for that are not here."""

import os

import jax
import pytest

from ring import rates, targets


@pytest.mark.parametrize(
    ("name", "platform", "size", "gib"),
    [
        ("v4:2x2x4", "tpu", 16, 30.75),
        ("v5e:16x16", "tpu", 256, 15.75),
        ("v5p:4x4x16", "tpu", 256, 95.73),
        ("v6e:2x4", "tpu", 8, 31.24),
        ("a100-40:3", "cuda", 3, 39.4),
        ("a100-80:8", "cuda", 8, 79.3),
        ("h100:16", "cuda", 16, 79.1),
        ("h200:256", "cuda", 256, 139.7),
    ],
)
def test_names_are_read(name, platform, size, gib):
    target = targets.parse(name)
    assert (target.platform, target.size, str(target)) == (platform, size, name)
    assert target.memory / 2**30 == pytest.approx(gib, abs=0.05)
    if targets.installed(platform):
        devices = targets.devices(name)
        assert len(devices) == size
        assert devices[0].platform == {"tpu": "tpu", "cuda": "gpu"}[platform]


def test_cpu_devices_are_those_that_jax_simulates():
    assert targets.devices("cpu:8") == jax.devices()
    assert targets.devices("cpu:2") == jax.devices()[:2]
    assert targets.parse("cpu:2").memory == pytest.approx(4 * targets.parse("cpu:8").memory, abs=8)
    with pytest.raises(ValueError, match="JAX simulates 8 CPU devices; set JAX_NUM_CPU_DEVICES=9"):
        targets.devices("cpu:9")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("b200:8", "none of v4, v5e, .*, cpu, as in v5e:2x4"),
        ("v5e:8", "name a slice by its shape, such as v5e:2x4"),
        ("v4:2x4", "name a slice by its shape, such as v4:2x2x2"),
        ("v4:0x2x2", "name a slice by its shape"),
        ("v5e", "name a slice by its shape"),
        ("h200", "name a number of devices, such as h200:8"),
        ("h200:+8", "name a number of devices"),
        ("cpu:2x4", "name a number of devices, such as cpu:8"),
        ("v5e:3x4", "sides of a slice are powers of two"),
        ("v4:2x2x3", "sides of a slice are 1, 2 or multiples of 4"),
        ("v6e:16x32", "a pod of v6e is 16x16"),
        ("h100:12", "GPUs fill hosts of 8; try h100:16"),
    ],
)
def test_what_no_target_is_called(name, message):
    with pytest.raises(ValueError, match=message):
        targets.parse(name)


@pytest.mark.parametrize(("name", "extra"), [("v5e:2x4", "plan-tpu"), ("h200:8", "plan-gpu")])
def test_a_missing_compiler_says_what_to_install(name, extra, monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(targets.MissingCompiler, match=rf'pip install "exoring\[{extra}\]"'):
        targets.devices(name)


def test_the_environment_is_left_alone():
    before = dict(os.environ)
    if not targets.installed("tpu"):
        pytest.skip("needs plan-tpu")
    targets.devices("v5e:2x4")
    assert dict(os.environ) == before


def test_options_are_for_gpus_alone():
    assert targets.compiler_options("tpu") == targets.compiler_options("cpu") == {}
    assert targets.compiler_options("gpu") == targets.compiler_options("cuda") != {}


def test_rates_are_known_by_target_and_by_device():
    flops = {"a100-80:8": 312e12, "h200:8": 989e12, "v4:2x2x2": 275e12, "v6e:2x4": 918e12}
    for name, expected in flops.items():
        found = targets.parse(name).rates
        assert found and found.bfloat16 == expected
    assert targets.parse("cpu:8").rates is None and targets.parse("cpu:8").link(8) is None
    names = {
        "NVIDIA A100-SXM4-40GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "TPU v5 lite": 197e12,
        "TPU v5": 459e12,
        "TPU v6 lite": 918e12,
    }
    for name, expected in names.items():
        known = rates.of_device(name)
        assert known and known.rates.bfloat16 == expected
    assert rates.of_device("cpu") is rates.of_device("NVIDIA H100 PCIe") is None


def test_a_ring_of_several_hosts_is_as_fast_as_the_network():
    target = targets.parse("h200:16")
    assert target.link(8) == 9 * target.link(16) == 450e9
    assert targets.parse("h200:24").link(6) == 50e9  # of four such rings two straddle hosts
    assert targets.parse("h200:6").link(6) == 450e9
    assert targets.parse("v5e:4x4").link(16) == targets.parse("v5e:2x2").link(4)


def test_targets_double():
    doubled = [str(targets.parse(name).doubled()) for name in ("h200:3", "h200:8", "a100-40:256")]
    assert doubled == ["h200:6", "h200:16", "a100-40:512"]
    for name, more in (("v5e:2x4", "v5e:4x4"), ("v4:2x2x2", "v4:2x2x4"), ("h100:5", "h100:16")):
        assert str(targets.parse(name).doubled()) == more
    assert targets.parse("v5e:16x16").doubled() is None
