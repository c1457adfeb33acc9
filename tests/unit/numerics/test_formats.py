"""Number formats, rounding and operation tables: properties over arbitrary floats and all listed operations."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convolve.config import PrecisionConfig
from convolve.numerics.formats import BF16, DEVICE_MODELS, FORMATS, FP16, FP32, Format
from convolve.numerics.op_table import (
    BLACK,
    NORMS,
    TYPE_OF,
    WHITE,
    ListColor,
    OperationLists,
    RoundingRule,
    base_name,
    is_floating,
    is_norm,
    rounding_rule,
)
from convolve.numerics.policy import build_policy
from convolve.numerics.rounding import Flags, Grid, hash_elements, round_with_torch_, rounded

ATEN = torch.ops.aten
HALVES = pytest.mark.parametrize("target", [FP16, BF16], ids=lambda target: target.name)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def round_exactly(value, target):
    """Round a Python float to the grid of a format, ties to even, in exact arithmetic."""
    if value == 0:
        return value
    mantissa, exponent = abs(value), 0
    while mantissa >= 2:
        mantissa, exponent = mantissa / 2, exponent + 1
    while mantissa < 1 and exponent > 1 - target.bias:
        mantissa, exponent = mantissa * 2, exponent - 1
    spacing = 2.0 ** (exponent - target.mantissa_bits)
    result = round(abs(value) / spacing) * spacing
    result = float("inf") if result > target.largest else result
    return -result if value < 0 else result


@HALVES
@settings(deadline=None, max_examples=300)
@given(value=floats)
def test_rounding_equals_exact_arithmetic(target, value):
    expected = round_exactly(value, target)
    for rule in (lambda x: rounded(x, Grid(target)), lambda x: (round_with_torch_(x, Grid(target)), x)[1]):
        assert struct.pack("f", rule(torch.tensor([value])).item()) == struct.pack("f", expected)


@HALVES
@settings(deadline=None)
@given(values=st.lists(floats, min_size=1, max_size=30), key=st.integers(0, 2**64 - 1))
def test_stochastic_rounding_picks_a_neighbor_on_the_grid(target, values, key):
    x = torch.tensor(values)
    result = rounded(x, Grid(target), key)
    inside = x.abs() <= target.largest
    assert torch.equal(result, rounded(result, Grid(target))), "results are on the grid"
    spacing = torch.maximum(x.abs().double() * 2.0**-target.mantissa_bits, torch.tensor(target.smallest))
    assert ((result.double() - x.double()).abs()[inside] <= spacing[inside]).all()
    assert (torch.signbit(result) == torch.signbit(x)).all()


@HALVES
@settings(deadline=None)
@given(values=st.lists(floats, min_size=2, max_size=30))
def test_rounding_is_monotonic_and_odd(target, values):
    x = torch.tensor(sorted(values))
    result = rounded(x, Grid(target, saturate=True))
    assert (result[1:] >= result[:-1]).all() and result.abs().max() <= target.largest
    assert torch.equal(rounded(-x, Grid(target, saturate=True)), -result)


@pytest.mark.parametrize(("value", "flag"), [(torch.nan, Flags.NAN), (torch.inf, Flags.INFINITY), (1.0, Flags.NONE)])
def test_flags_of_single_values(value, flag):
    assert round_with_torch_(torch.tensor([value]), Grid(FP16)) == flag


@settings(deadline=None)
@given(exponent=st.integers(2, 8), mantissa=st.integers(1, 23))
def test_the_range_of_any_format_follows_from_its_bits(exponent, mantissa):
    target = Format("x", exponent, mantissa, torch.float32)
    assert target.bits == 1 + exponent + mantissa
    assert target.largest < 2.0 ** (target.bias + 1) <= target.largest * (1 + 2.0**-mantissa)
    assert target.smallest_normal == target.smallest * 2**mantissa
    assert target.smallest_normal * 2.0 ** (target.bias - 1) == 1.0


def test_formats_are_known_by_name_and_widths_agree_with_torch():
    assert list(FORMATS) == ["fp32", "fp16", "bf16"]
    assert all(target.bits == 8 * target.dtype.itemsize for target in FORMATS.values())


@pytest.mark.parametrize("model", DEVICE_MODELS.values(), ids=list(DEVICE_MODELS))
def test_a_device_model_defines_the_policy_that_options_override(model):
    policy = build_policy(PrecisionConfig(device_model=model.name))
    assert f"{policy.compute.bits}.{policy.master.bits}" == model.precision
    assert (policy.stochastic, policy.saturate) == (model.stochastic_rounding, model.saturate_on_overflow)
    assert policy.to_json()["device_model"] == model.name
    plain = build_policy(PrecisionConfig(device_model=model.name, precision="32.32"))
    assert (plain.compute, plain.stochastic, plain.saturate) == (FP32, False, False)


def test_random_bits_depend_on_key_and_position_only():
    one, longer = hash_elements(100, 7, torch.device("cpu")), hash_elements(1000, 7, torch.device("cpu"))
    assert torch.equal(one, longer[:100])
    assert longer.unique().numel() > 990
    low, high = hash_elements(1000, 8, torch.device("cpu")), hash_elements(1000, 7 + 2**32, torch.device("cpu"))
    assert (longer == low).sum() < 5 and (longer == high).sum() < 5


def test_every_listed_operation_exists_in_torch():
    missing = {name for name in TYPE_OF if not hasattr(ATEN, name)}
    assert missing == set()


def test_lists_contain_known_types_and_do_not_overlap():
    types = set(TYPE_OF.values())
    assert types >= WHITE | BLACK | NORMS and not WHITE & BLACK


@pytest.mark.parametrize(
    ("operation", "rule"),
    [
        (ATEN.view.default, RoundingRule.LEAVE),
        (ATEN.relu.default, RoundingRule.LEAVE),
        (ATEN.max_pool2d_with_indices.default, RoundingRule.LEAVE),
        (ATEN.add.Tensor, RoundingRule.ROUND),
        (ATEN.add_.Tensor, RoundingRule.ROUND),
        (ATEN.convolution.default, RoundingRule.ROUND),
        (ATEN.native_batch_norm.default, RoundingRule.ROUND_FIRST),
        (ATEN.native_group_norm.default, RoundingRule.ROUND_FIRST),
    ],
    ids=str,
)
def test_exact_operations_and_views_are_not_rounded(operation, rule):
    assert rounding_rule(operation) is rule


def test_names_have_neither_namespace_nor_overload():
    assert base_name(ATEN.convolution.default) == "convolution" and base_name(ATEN.add_.Tensor) == "add_"
    assert is_norm(ATEN.native_layer_norm_backward.default) and not is_norm(ATEN.mm.default)


def test_only_fp32_tensors_are_rounded():
    values = [torch.ones(1), torch.ones(1).double(), torch.ones(1).long(), 1.0, None]
    assert [is_floating(value) for value in values] == [True, False, False, False, False]


def test_gray_operations_inherit_or_compute_in_fp32():
    assert OperationLists().color(ATEN.relu.default) is ListColor.GRAY
    assert OperationLists(inherit_gray=False).color(ATEN.relu.default) is ListColor.BLACK


types = st.sets(st.sampled_from(sorted(set(TYPE_OF.values()))), max_size=5)


@settings(deadline=None)
@given(white_add=types, white_remove=types, black_add=types, black_remove=types)
def test_a_mix_list_never_puts_a_type_into_both_lists(white_add, white_remove, black_add, black_remove):
    content = {
        "white-list": {"to-add": sorted(white_add), "to-remove": sorted(white_remove)},
        "black-list": {"to-add": sorted(black_add), "to-remove": sorted(black_remove)},
    }
    lists = OperationLists().apply_mix_list(content)
    assert not lists.white & lists.black
    assert black_add <= lists.black and white_add - black_add <= lists.white
    assert not (white_remove - white_add) & lists.white and not (black_remove - black_add) & lists.black
    assert OperationLists().white == WHITE, "the default lists do not change"
