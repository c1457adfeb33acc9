"""Rounding: both formats, native and torch, to nearest and stochastic."""

import subprocess
import sys

import pytest
import torch

from convolve.kernels import rounding
from convolve.numerics.formats import BF16, FP16, FP32
from convolve.numerics.rounding import Flags, Grid, round_, round_with_torch_, rounded

HALVES = (FP16, BF16)


def all_values(target):
    """Every finite number of a 16-bit format, as float32, in rising order."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(target.dtype).float()
    return values[values.isfinite()].unique()


def hard_floats():
    """Random bits, which cover all exponents, and the ends of the ranges."""
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31, (1_000_000,), generator=draw, dtype=torch.int64).to(torch.int32)
    ends = [0.0, -0.0, 65504, 65519.99, 65520, 65536, 3.3961775e38, 3.4e38, 2**-14, 2**-24, 2**-25, 1e-45, torch.inf]
    return torch.cat([words.view(torch.float32), torch.tensor(ends), -torch.tensor(ends)])


def same_bits(a, b):
    nan = a.isnan() & b.isnan()
    return bool((nan | (a.view(torch.int32) == b.view(torch.int32))).all())


def native_and_torch(x, grid, key=None):
    pair = []
    for rule in (round_, round_with_torch_):
        copy = x.clone()
        pair.append((copy, rule(copy, grid, key)))
    return pair


@pytest.mark.parametrize("target", HALVES, ids=lambda target: target.name)
def test_the_range_of_a_format_is_that_of_torchs_type(target):
    info = torch.finfo(target.dtype)
    assert (target.bits, target.largest, target.smallest_normal) == (16, info.max, info.tiny)
    assert target.smallest == info.smallest_normal * info.eps


@pytest.mark.parametrize("target", HALVES, ids=lambda target: target.name)
def test_nearest_has_the_bits_of_torchs_cast_on_every_value_every_midpoint_and_random_floats(target):
    values = all_values(target)
    midpoints = ((values[1:].double() + values[:-1].double()) / 2).float()
    nudged = [torch.nextafter(midpoints, torch.full_like(midpoints, end)) for end in (-torch.inf, torch.inf)]
    x = torch.cat([values, midpoints, *nudged, hard_floats()])
    expected = x.to(target.dtype).float()
    for result, _ in native_and_torch(x, Grid(target)):
        assert same_bits(result, expected)
    assert torch.equal(rounded(values, Grid(target)), values)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("target", HALVES, ids=lambda target: target.name)
def test_native_and_torch_rounding_have_the_same_bits_and_flags(target, saturate):
    assert rounding.load() is not None or pytest.skip("no C compiler here")
    for key in (None, 7, 2**64 - 1):
        (one, flags_one), (two, flags_two) = native_and_torch(hard_floats(), Grid(target, saturate), key)
        assert same_bits(one, two)
        assert flags_one == flags_two


def test_fp32_is_checked_and_not_changed():
    x = hard_floats()
    (one, flags_one), (two, flags_two) = native_and_torch(x, Grid(FP32))
    assert same_bits(one, x) and same_bits(two, x)
    assert flags_one == flags_two == Flags.NAN | Flags.INFINITY


@pytest.mark.parametrize(
    ("value", "flags", "plain", "clamped"),
    [
        (1.0, Flags.NONE, 1.0, 1.0),
        (65519.0, Flags.NONE, 65504.0, 65504.0),
        (65520.0, Flags.OVERFLOW, torch.inf, 65504.0),
        (-1e30, Flags.OVERFLOW, -torch.inf, -65504.0),
    ],
)
def test_overflow_becomes_infinity_or_the_end_of_the_range(value, flags, plain, clamped):
    for saturate, expected in ((False, plain), (True, clamped)):
        for result, found in native_and_torch(torch.tensor([value]), Grid(FP16, saturate)):
            assert (result.item(), found) == (expected, flags)


@pytest.mark.parametrize("target", HALVES, ids=lambda target: target.name)
def test_stochastic_rounding_is_unbiased_within_4_sigma_on_ten_million_draws(target):
    """Ten values, a million draws each; subnormals, a negative one and one close to a grid point are among them."""
    step, least = 2.0**-target.mantissa_bits, target.smallest
    values = [1 + step * fraction for fraction in (0.5, 0.25, 0.9, 0.01, 1 / 3)]
    values += [-3.3, 1000.7, least * 0.3, least * 5.5, 0.1]
    draws = 1_000_000
    for number, value in enumerate(values):
        x = torch.full((draws,), value)
        exact = x[0].double().item()
        round_(x, Grid(target), 1000 + number)
        low, high = x.aminmax()
        ups = int((x == high).sum())
        assert low < high and ups + int((x == low).sum()) == draws, f"{value} became more or less than two values"
        probability = (exact - low.item()) / (high.item() - low.item())
        sigma = (draws * probability * (1 - probability)) ** 0.5
        assert abs(ups - draws * probability) < 4 * sigma, f"{value}: {ups} of {draws} with probability {probability}"


def test_stochastic_rounding_has_the_same_bits_from_the_same_key_and_others_from_another():
    x = torch.randn(100_000)
    one, again, other = (rounded(x, Grid(FP16), key) for key in (5, 5, 6))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    values = all_values(FP16)
    assert torch.equal(rounded(values, Grid(FP16), 5), values), "values on the grid stay"


def test_the_number_of_threads_changes_nothing():
    x, threads = torch.randn(300_000), torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(rounded(x, Grid(FP16), 99))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("key", [None, 3])
def test_any_memory_layout_is_rounded(key):
    x = torch.randn(2, 3, 4, 5)
    for view in (x.clone(), x.clone().to(memory_format=torch.channels_last), x.clone()[:, :, ::2], x.clone().mT):
        expected = view.half().float()
        round_(view, Grid(FP16), key)
        assert (view - expected).abs().max() <= (0 if key is None else 0.004)
        assert torch.equal(view, view.half().float())
    assert round_(torch.empty(0), Grid(FP16)) == 0


def test_without_a_compiler_torch_rounds(tmp_path):
    code = (
        "import torch; from convolve.kernels import rounding as kernel; from convolve.numerics.rounding import *;"
        "from convolve.numerics.formats import FP16; assert kernel.load() is None;"
        "x = torch.tensor([1.0001]); round_(x, Grid(FP16)); assert x.item() == 1.0; print('done')"
    )
    environment = {"PATH": str(tmp_path), "CONVOLVE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.strip() == "done", done.stderr
