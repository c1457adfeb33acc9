"""Half partials in native code: the bits of torch operations for any shape, vector width and number of threads."""

import random

import pytest
import torch

from convolve.kernels import half_partials
from convolve.kernels.binding import Kernel
from convolve.kernels.build import Unavailable
from convolve.kernels.half_partials import Accumulator, Window, load
from convolve.numerics.formats import BF16, FP16
from convolve.numerics.half_accumulation import Convolution, accumulate, multiply
from convolve.numerics.rounding import Grid, rounded

pytestmark = pytest.mark.skipif(isinstance(load(False), Unavailable), reason="no native code on this machine")

KEYS = [None, 0x1234_5678_9ABC_DEF0]
FORMATS = pytest.mark.parametrize("format", [FP16, BF16], ids=lambda format: format.name)
ROUNDING = pytest.mark.parametrize("key", KEYS, ids=["nearest", "stochastic"])


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Case:
    """A convolution of random shape and settings, with its operands."""

    def __init__(self, seed, format, scale=1.0):
        draw = random.Random(seed)
        self.grid = Grid(format, saturate=draw.random() < 0.3)
        self.groups = draw.choice((1, 1, 2, 3))
        self.kernel = draw.choice((1, 2, 3)), draw.choice((1, 3, 5))
        self.window = [[draw.choice(values) for _ in "hw"] for values in ((1, 2, 3), (0, 1, 2), (1, 1, 2))]
        least = [d * (k - 1) + 1 - 2 * p for k, p, d in zip(self.kernel, *self.window[1:], strict=True)]
        size = [max(1, low) + draw.choice((0, 1, 4, 7)) for low in least]
        channels, outputs = (self.groups * draw.choice((1, 3, 16, 20, 35)) for _ in "xy")
        generator = torch.Generator().manual_seed(seed)
        self.x = self._operand((draw.choice((1, 2, 5, 9)), channels, *size), generator, scale)
        self.weight = self._operand((outputs, channels // self.groups, *self.kernel), generator, scale)
        if draw.random() < 0.5:
            self.x, self.weight = (t.to(memory_format=torch.channels_last) for t in (self.x, self.weight))
        height, width = Window(*self.window, self.groups).output_size(self.x, self.weight)
        self.grad = self._operand((len(self.x), outputs, height, width), generator, scale)

    def _operand(self, shape, generator, scale):
        return rounded(torch.randn(shape, generator=generator) * scale, self.grid)

    def run(self, key):
        """Return the output and both gradients."""
        convolution = Convolution(*self.window, self.groups, self.grid)
        output = convolution.forward(self.x, self.weight, None, key)
        return output, *convolution.backward(self.grad, self.x, self.weight, (True, True, False), key)[:2]

    def run_with_torch(self, key):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(half_partials, "can_run", lambda *operands: False)
            return self.run(key)


def assert_same_bits(ours, expected):
    """Compare bits, the sign of zero included; any NaN equals any other."""
    for one, other in zip(ours, expected, strict=True):
        assert one.shape == other.shape
        words = [torch.where(t.isnan(), torch.nan, t).contiguous().view(torch.int32) for t in (one, other)]
        assert torch.equal(*words)


@ROUNDING
@FORMATS
@pytest.mark.parametrize("seed", range(12))
def test_results_have_the_bits_of_torch_operations(seed, format, key):
    case = Case(seed, format)
    assert half_partials.can_run(Accumulator(format is BF16, False), case.x, case.weight)
    assert_same_bits(case.run(key), case.run_with_torch(key))


@ROUNDING
@pytest.mark.parametrize(
    ("format", "scale"), [(FP16, 1e-4), (FP16, 100.0), (BF16, 1e-20), (BF16, 1e19)], ids=lambda value: str(value)
)
def test_bits_agree_where_values_underflow_and_overflow(format, scale, key):
    for seed in range(3):
        case = Case(seed, format, scale)
        assert_same_bits(case.run(key), case.run_with_torch(key))


@pytest.mark.parametrize("lanes", [4, 8, 16])
@FORMATS
def test_bits_do_not_depend_on_the_vector_width(format, lanes, monkeypatch):
    case = Case(5, format)
    expected = [case.run(key) for key in KEYS]
    kernel = load(format is BF16, f"-DLANES={lanes}")
    assert isinstance(kernel, Kernel) and kernel.constant("lanes") == lanes
    monkeypatch.setattr(half_partials, "load", lambda bf16: kernel)
    for key, results in zip(KEYS, expected, strict=True):
        assert_same_bits(case.run(key), results)


@ROUNDING
def test_bits_do_not_depend_on_the_number_of_threads(key, threads):
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(Case(7, FP16).run(key))
    for again in found[1:]:
        assert_same_bits(again, found[0])


def test_an_image_has_the_same_bits_in_any_batch():
    window, accumulator = Window((1, 1), (1, 1), (1, 1), 1), Accumulator(False, False)
    x, weight = (rounded(torch.randn(*shape), Grid(FP16)) for shape in ((9, 24, 6, 5), (40, 24, 3, 3)))
    together = half_partials.convolve(x, weight, window, accumulator, None)
    for i in range(len(x)):
        alone = half_partials.convolve(x[i : i + 1], weight, window, accumulator, None)
        assert_same_bits([alone], [together[i : i + 1]])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_padding_times_infinity_is_not_skipped(bad):
    """An image of one pixel: all taps but one meet padding, and zero times infinity is NaN."""
    case = Case(0, FP16)
    case.window, case.groups, case.grid = [[1, 1], [1, 1], [1, 1]], 1, Grid(FP16)
    case.x, case.weight, case.grad = torch.ones(3, 20, 1, 1), torch.ones(4, 20, 3, 3), torch.ones(3, 4, 1, 1)
    assert case.run(None)[0].eq(20).all()
    case.weight[1, 2, 0, 0] = case.grad[0, 3, 0, 0] = bad
    results = case.run(None)
    assert results[0][:, 1].isnan().all() and results[2][3].isnan().any()
    assert_same_bits(results, case.run_with_torch(None))


def test_operands_off_the_grid_are_rounded_first():
    a, b, grid = torch.randn(7, 50), torch.randn(50, 9), Grid(FP16)
    assert torch.equal(multiply(a, b, grid), multiply(rounded(a, grid), rounded(b, grid), grid))
    assert torch.equal(multiply(a, b, grid), accumulate(a, b, grid))


@ROUNDING
def test_matrix_products_have_the_bits_of_torch_operations(key):
    for rows, depth, columns in ((1, 1, 1), (3, 17, 5), (70, 300, 130)):
        a, b = (rounded(torch.randn(*shape), Grid(FP16)) for shape in ((rows, depth), (columns, depth)))
        assert_same_bits([multiply(a, b.t(), Grid(FP16), key)], [accumulate(a, b.t(), Grid(FP16), key)])


def test_an_empty_batch_has_gradients_of_zeros():
    convolution = Convolution((1, 1), (1, 1), (1, 1), 1, Grid(FP16))
    x, weight = torch.empty(0, 3, 5, 5), torch.randn(4, 3, 3, 3)
    out = convolution.forward(x, weight, None, 5)
    to_input, to_weight, _ = convolution.backward(out, x, weight, (True, True, False), 5)
    assert out.shape == (0, 4, 5, 5) and to_input.shape == x.shape
    assert torch.equal(to_weight, torch.zeros_like(weight))


GUARD, MARK = 64, 12345.0


def guarded(size):
    memory = torch.full((size + 2 * GUARD,), MARK)
    memory[GUARD:-GUARD] = torch.nan
    return memory


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_no_memory_outside_the_buffers_is_touched(lanes):
    """Every result lies between guards, and scratch memory starts as NaN, which exposes unwritten values."""
    kernel, case = load(False, f"-DLANES={lanes}"), Case(3, FP16)
    case.grid = Grid(FP16)
    expected = case.run(None)
    sizes = half_partials._sizes(case.x, case.weight, Window(*case.window, case.groups))
    x, weight, grad = (t.contiguous(memory_format=torch.channels_last) for t in (case.x, case.weight, case.grad))
    scratch = guarded(kernel.scratch(sizes, 1) // 4)
    made = [guarded(tensor.numel()) for tensor in expected]
    y, dx, dw, work = (memory[GUARD:].data_ptr() for memory in (*made, scratch))
    kernel.forward(sizes, x.data_ptr(), weight.data_ptr(), y, None, 0, work, 1, None)
    kernel.backward(sizes, x.data_ptr(), weight.data_ptr(), grad.data_ptr(), dx, dw, None, None, 0, work, 1, None)
    for memory in (*made, scratch):
        assert memory[:GUARD].eq(MARK).all() and memory[-GUARD:].eq(MARK).all()
    for memory, tensor in zip(made, expected, strict=True):
        n, c, h, w = tensor.shape
        assert_same_bits([memory[GUARD:-GUARD].view(n, h, w, c).permute(0, 3, 1, 2)], [tensor])
