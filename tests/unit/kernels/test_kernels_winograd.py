"""Native 3x3 convolutions against the definition in float64."""

import pytest
import torch
from torch.nn import functional

from convolve.kernels import winograd

pytestmark = pytest.mark.skipif(winograd.describe() is not None, reason=f"no native code: {winograd.describe()}")

LAST = torch.channels_last
SHAPES = [
    # images, inputs, outputs, height, width
    (1, 16, 16, 4, 4),
    (3, 16, 32, 8, 8),
    (2, 48, 16, 7, 7),
    (2, 16, 48, 13, 5),
    (5, 32, 32, 16, 12),
    (1, 64, 144, 15, 31),
    (9, 16, 16, 32, 32),
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


def test_whole_numbers_come_out_exactly():
    """With inputs of -2 to 2 and filters in multiples of 24 no step of the arithmetic rounds."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (2, 16, 8, 8), generator=rng).float()
    weight = 24.0 * torch.randint(-1, 2, (16, 16, 3, 3), generator=rng)
    assert (winograd.convolve(x, weight) - define(x, weight)).abs().max() < 1e-2


@pytest.mark.parametrize("shape", SHAPES[1:5], ids=str)
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


def test_any_memory_layout_is_taken():
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


def test_filters_gradients_are_kept_as_filters_are():
    """Otherwise the optimiser would copy each of them in every step."""
    _, _, dw = run(*make(2, 16, 32, 8, 8))
    assert dw.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize(
    ("height", "width", "pays"),
    [(4, 4, True), (7, 7, True), (32, 32, True), (3, 3, False), (5, 5, False), (1, 1, False)],
)
def test_small_images_are_left_alone(height, width, pays):
    assert winograd.suits_image(torch.zeros(1, 16, height, width)) is pays


def test_other_formats_are_left_alone():
    assert not winograd.suits_image(torch.zeros(1, 16, 8, 8, dtype=torch.float64))
    assert not winograd.suits_image(torch.zeros(1, 16, 8, 8, device="meta"))
    assert not winograd.suits_channels(3, 16)
    assert not winograd.suits_channels(16, 50)
