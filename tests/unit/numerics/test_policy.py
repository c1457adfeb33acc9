"""Policies from configs, and the choice between native and emulated."""

import json

import pytest
import torch

from convolve import device
from convolve.config import PrecisionConfig
from convolve.errors import ConfigError, DeviceError
from convolve.kernels import build
from convolve.numerics.formats import BF16, FP16, FP32
from convolve.numerics.op_table import ListColor, OperationLists
from convolve.numerics.policy import build_policy
from convolve.numerics.select import select_numerics

CPU = torch.device("cpu")


def policy(**options):
    return build_policy(PrecisionConfig(**options))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "32.32"),
        ({"precision": "32.32", "stochastic_rounding": True, "enable_half_partials": True}, "32.32"),
        ({"precision": "16.32"}, "16.32 fp16"),
        ({"precision": "16.32", "stochastic_rounding": True}, "16.32 fp16 stochastic"),
        ({"precision": "16.16"}, "16.16 fp16 stochastic"),
        ({"precision": "16.16", "stochastic_rounding": False, "half_type": "bf16"}, "16.16 bf16"),
        ({"precision": "16.16", "enable_half_partials": True}, "16.16 fp16 stochastic half partials"),
        ({"device_model": "ipu-mk2"}, "16.16 fp16 stochastic"),
        ({"device_model": "ipu-mk2", "precision": "16.32", "stochastic_rounding": False}, "16.32 fp16"),
        ({"device_model": "ascend-910"}, "16.32 fp16 saturating"),
        ({"device_model": "ascend-910", "saturate_on_overflow": False}, "16.32 fp16"),
        ({"precision_mode": "must_keep_origin_dtype"}, "32.32"),
        ({"precision_mode": "allow_fp32_to_fp16"}, "16.32 fp16 by operation"),
        ({"precision_mode": "allow_mix_precision"}, "16.32 fp16 by operation"),
        ({"precision_mode": "force_fp16"}, "16.32 fp16"),
    ],
)
def test_a_config_means_a_policy(options, name):
    assert policy(**options).name == name


def test_formats_follow_the_precision():
    assert (policy(precision="16.32").compute, policy(precision="16.32").master) == (FP16, FP32)
    assert policy(precision="16.16", half_type="bf16").master is BF16


def test_a_forced_name_means_all_layers_inside():
    chosen = policy(precision="16.16", force_fp32=("layer1.0", "fc"))
    assert [chosen.keeps_fp32(name) for name in ("layer1/0/conv1", "layer1/0", "layer1/01", "fc", "fc2")] == [
        True, True, False, True, False,
    ]  # fmt: skip


def test_a_mix_list_moves_operations(tmp_path):
    file = tmp_path / "ops_info.json"
    file.write_text(json.dumps({"black-list": {"to-add": ["Mul", "Conv2D"]}, "white-list": {"to-remove": ["MatMul"]}}))
    lists = policy(precision_mode="allow_mix_precision", mixlist_file=file).lists
    ops = torch.ops.aten
    colors = [lists.color(op) for op in (ops.mul.Tensor, ops.convolution.default, ops.mm.default, ops.relu.default)]
    assert colors == [ListColor.BLACK, ListColor.BLACK, ListColor.GRAY, ListColor.GRAY]
    plain = OperationLists()
    assert [plain.color(op) for op in (ops.mm.default, ops.convolution_backward.default)] == [ListColor.WHITE] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read as JSON"),
        ("[]", "not an object; write black-list"),
        ('{"blacklist": {}}', "did you mean black-list"),
        ('{"black-list": {"add": []}}', "unknown key in black-list; use only to-add and to-remove"),
        ('{"black-list": {"to-add": "Mul"}}', "lists of operation types"),
    ],
)
def test_a_broken_mix_list_is_named(tmp_path, text, message):
    file = tmp_path / "mix.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        policy(precision_mode="allow_mix_precision", mixlist_file=file)


def test_the_choice_comes_with_its_reason():
    assert select_numerics(PrecisionConfig(), CPU).execution == "plain"
    modeled = select_numerics(PrecisionConfig(device_model="ipu-mk2"), CPU)
    assert modeled.execution == "emulated" and "--device-model ipu-mk2 is emulated exactly" in str(modeled)
    saturating = select_numerics(PrecisionConfig(precision="16.16", saturate_on_overflow=True), CPU)
    assert saturating.execution == "emulated" and "no native kernel supports saturation;" in str(saturating)
    requested = select_numerics(PrecisionConfig(precision="16.32", numerics="emulated"), CPU)
    assert requested.execution == "emulated" and "as requested" in requested.reason
    watched = select_numerics(PrecisionConfig(fp_exceptions=True), CPU)
    assert watched.execution == "emulated"


def test_native_numerics_that_are_impossible_are_rejected():
    with pytest.raises(DeviceError, match="no native kernel supports saturation; use"):
        select_numerics(
            PrecisionConfig(precision="16.32", numerics="native", enable_half_partials=True, saturate_on_overflow=True),
            CPU,
        )


@pytest.mark.parametrize(
    ("works", "speeds", "execution", "reason"),
    [
        (False, (0, 0), "emulated", "do not work on this CPU"),
        (True, (10, 100), "emulated", "0.10 times the speed of fp32"),
        (True, (300, 100), "native", "work and are no slower"),
    ],
)
def test_auto_gives_the_reason_from_the_probe(tmp_path, monkeypatch, works, speeds, execution, reason):
    """The results of the probe are read from its cache file, as on another machine."""
    from dataclasses import asdict

    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path))
    monkeypatch.delenv(device.ISA_LIMIT, raising=False)
    monkeypatch.setattr(device, "cpu_flags", lambda: {"avx512_bf16"})
    results = {}
    for operation in ("matmul", "convolution"):
        for kind, speed in (("bfloat16", speeds[0]), ("float32", speeds[1])):
            capability = device.Capability(operation, kind, works or kind == "float32", speed, False)
            results[f"{operation}-{kind}-free"] = asdict(capability)
    device._probe_file().write_text(json.dumps(results))
    choice = select_numerics(PrecisionConfig(precision="16.32", half_type="bf16"), CPU)
    assert choice.execution == execution
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"precision": "16.32"}, "as requested"),
        ({"precision": "16.32", "enable_half_partials": True}, "; not emulated: half partials (sums are fp32)"),
        ({"precision": "16.32", "stochastic_rounding": True}, "; not emulated: stochastic rounding"),
        ({"precision": "16.16"}, "of activations and gradients (that of weights is computed)"),
    ],
)
def test_a_native_choice_names_what_it_does_not_emulate(options, difference):
    choice = select_numerics(PrecisionConfig(numerics="native", **options), torch.device("meta"))
    assert choice.execution == "native" and choice.reason.endswith(difference)


def test_a_cpu_without_the_instructions_is_not_measured(monkeypatch):
    monkeypatch.setattr(device, "cpu_flags", lambda: {"avx2"})
    monkeypatch.setattr(device, "probe", lambda *_, **__: pytest.fail("measured"))
    choice = select_numerics(PrecisionConfig(precision="16.16"), CPU)
    assert choice.execution == "emulated" and choice.reason.startswith("this CPU has no fp16 arithmetic; rounding")


def test_the_choice_names_the_reason_for_rounding_without_native_code(monkeypatch):
    monkeypatch.setattr(build, "load", lambda file: build.Unavailable("cc failed: no such option"))
    choice = select_numerics(PrecisionConfig(precision="16.16"), torch.device("cpu"))
    assert "rounding in torch (cc failed: no such option)" in choice.reason
