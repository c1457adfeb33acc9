"""Native 3x3 convolutions against the definition in float64."""

import pytest
import torch
from torch.nn import functional

from convolve.kernels import winograd
from convolve.kernels.build import Unavailable

pytestmark = pytest.mark.skipif(isinstance(winograd.load(), Unavailable), reason="no native code on this machine")

LAST = torch.channels_last
FILTERS = torch.zeros(16, 16, 3, 3)
GUARDS = 4096  # floats before and behind what a kernel may touch
# images, vectors of inputs and of outputs, height, width
GUARDED = [(1, 1, 1, 4, 4), (3, 3, 2, 9, 7), (2, 2, 5, 5, 16), (9, 1, 3, 32, 32), (2, 1.5, 2.5, 9, 7)]
SHAPES = [
    # images, inputs, outputs, height, width
    (1, 16, 16, 4, 4),
    (3, 16, 32, 8, 8),
    (2, 48, 16, 7, 7),
    (2, 16, 48, 13, 5),
    (5, 32, 32, 16, 12),
    (1, 64, 144, 15, 31),
    (9, 16, 16, 32, 32),
    (2, 24, 40, 9, 8),
    (1, 56, 24, 8, 5),
]


def make(images, inputs, outputs, height, width):
    """A batch, filters and a gradient of the output."""
    rng = torch.Generator().manual_seed(height * width + inputs)
    x = torch.randn(images, inputs, height, width, generator=rng).contiguous(memory_format=LAST)
    weight = (torch.randn(outputs, inputs, 3, 3, generator=rng) / (9 * inputs) ** 0.5).contiguous(memory_format=LAST)
    dy = torch.randn(images, outputs, height, width, generator=rng).contiguous(memory_format=LAST)
    return x, weight, dy


def run(x, weight, dy, convolve=winograd.convolve):
    """The output and both gradients."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = convolve(x, weight)
    y.backward(dy)
    return y.detach(), x.grad, weight.grad


def define(x, weight):
    return functional.conv2d(x, weight, padding=1)


def distance(found, exact):
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_are_those_of_the_definition(shape):
    given = make(*shape)
    exact = run(*(one.double() for one in given), define)
    y, dx, dw = run(*given)
    assert distance(y, exact[0]) < 2e-5
    assert distance(dx, exact[1]) < 2e-5
    assert distance(dw, exact[2]) < 1e-4


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_vector_widths_of_other_machines_equal_the_definition(lanes, monkeypatch):
    """Also with half full panels, which an odd number of vectors of channels leaves, and half full vectors."""
    other = winograd.load(f"-DLANES={lanes}")
    assert other.constant("lanes") == lanes
    monkeypatch.setattr(winograd, "load", lambda: other)
    half = lanes // 2
    shapes = ((2, lanes, lanes, 5, 7), (3, 3 * lanes, 2 * lanes, 8, 8), (2, 2 * lanes, 5 * lanes, 13, 9))
    for shape in (*shapes, (1, 3 * half, 5 * half, 7, 4), (2, 7 * half, 3 * half, 9, 9)):
        given = make(*shape)
        exact = run(*(one.double() for one in given), define)
        found = run(*given)
        assert all(distance(one, other) < 1e-4 for one, other in zip(found, exact, strict=True)), shape


def test_whole_numbers_are_those_of_the_definition_once_rounded():
    """The matrices hold fractions, so single bits are lost on the way; never as much as half a number."""
    rng = torch.Generator().manual_seed(1)
    shapes = ((2, 16, 8, 8), (32, 16, 3, 3), (2, 32, 8, 8))
    given = [torch.randint(-9, 10, shape, generator=rng).float() for shape in shapes]
    exact = run(*(one.double() for one in given), define)
    for one, other in zip(run(*given), exact, strict=True):
        assert torch.equal(one.round().double(), other)


def guard(count, inside, around):
    """Floats for a kernel among others of a known value."""
    whole = torch.full((count + 2 * GUARDS,), around)
    whole[GUARDS:-GUARDS] = inside
    return whole


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_no_memory_outside_the_buffers_is_touched(lanes, threads):
    """What is written stays within; and what is read, since a NaN from around the inputs would spoil the results."""
    kernel = winograd.load(f"-DLANES={lanes}")
    for images, inputs, outputs, height, width in GUARDED:
        inputs, outputs, pixels = int(inputs * lanes), int(outputs * lanes), images * height * width
        sizes = winograd._Shape(images, height, width, inputs, outputs, 9 * inputs, 1, 3 * inputs, inputs)
        filters = 9 * inputs * outputs
        given = [guard(count, 1.0, torch.nan) for count in (pixels * inputs, filters)]
        counts = (pixels * outputs, filters, kernel.scratch(sizes, threads) // 4)
        made = [guard(count, 77.0, 77.0) for count in counts]
        x, w, y, dw, scratch = (whole.data_ptr() + 4 * GUARDS for whole in (*given, *made))
        kernel.forward(sizes, x, w, y, scratch, threads, kernel.parallel)
        kernel.backward(sizes, x, y, dw, scratch, threads, kernel.parallel)
        for name, whole in zip(("y", "dw", "scratch"), made, strict=True):
            assert whole.isfinite().all(), (name, sizes[:])
            assert whole[:GUARDS].eq(77).all() and whole[-GUARDS:].eq(77).all(), (name, sizes[:])


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_the_number_of_threads_changes_no_bit(shape, threads):
    given = make(*shape)
    threads(1)
    alone = run(*given)
    threads(3)
    together = run(*given)
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def test_an_image_has_the_same_bits_in_any_batch():
    x, weight, _ = make(9, 16, 32, 12, 12)
    whole = winograd.convolve(x, weight)
    for first in (0, 4, 8):
        assert torch.equal(winograd.convolve(x[first : first + 1], weight)[0], whole[first])
        assert torch.equal(winograd.convolve(x[first:], weight), whole[first:])


def test_unsupported_channel_counts_are_rejected_before_any_memory_is_touched():
    for inputs, outputs, given in ((3, 16, 3), (16, 50, 16), (16, 18, 16), (16, 16, 32)):
        with pytest.raises(AssertionError, match="not for native code"):
            winograd.convolve(torch.zeros(1, given, 8, 8), torch.zeros(outputs, inputs, 3, 3))


def test_any_memory_layout_is_accepted():
    x, weight, dy = make(2, 16, 32, 8, 8)
    wanted = run(x, weight, dy)
    wide = torch.cat((x, x), dim=1)[:, :16]
    for other in (x.contiguous(), wide):
        found = run(other, weight.contiguous(), dy.contiguous())
        assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_not_a_number_and_infinity_are_passed_on():
    x, weight, _ = make(2, 16, 16, 8, 8)
    x[0, 3, 2, 2] = float("nan")
    y = winograd.convolve(x, weight)
    assert y[0, :, 1:4, 1:4].isnan().all()
    assert y[1].isfinite().all()


def test_only_gradients_that_are_needed_are_computed():
    x, weight, dy = make(2, 16, 16, 8, 8)
    frozen = x.clone().requires_grad_()
    winograd.convolve(frozen, weight).backward(dy)
    assert frozen.grad is not None
    assert weight.grad is None


def test_gradients_of_filters_have_the_memory_layout_of_filters():
    """Otherwise the optimizer would copy each of them in every step."""
    _, _, dw = run(*make(2, 16, 32, 8, 8))
    assert dw.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize(
    ("height", "width", "pays"),
    [(4, 4, True), (7, 7, True), (32, 32, True), (3, 3, False), (5, 5, False), (1, 1, False)],
)
def test_small_images_are_left_alone(height, width, pays):
    assert winograd.can_run(torch.zeros(1, 16, height, width), FILTERS) is pays


def test_other_formats_are_left_alone():
    assert winograd.can_run(torch.zeros(1, 16, 8, 8), FILTERS)
    assert not winograd.can_run(torch.zeros(1, 16, 8, 8, dtype=torch.float64), FILTERS)
    assert not winograd.can_run(torch.zeros(1, 16, 8, 8), FILTERS.double())
    assert not winograd.can_run(torch.zeros(1, 16, 8, 8, device="meta"), FILTERS)
    assert not winograd.supports(3, 16)
    assert not winograd.supports(16, 50)


def test_an_empty_batch_has_gradients_of_zeros(memory_of_nan):
    run(*make(1, 32, 32, 8, 8))  # leaves other sums in the scratch memory
    _, dx, dw = run(*make(0, 32, 32, 8, 8))
    assert dx.shape == (0, 32, 8, 8) and dw.shape == (32, 32, 3, 3) and not dw.any()
