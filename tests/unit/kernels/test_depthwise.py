"""Convolutions of each channel by itself: against PyTorch's, in any batch, with any number of threads."""

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

from convolve.kernels import depthwise
from convolve.kernels.build import Unavailable
from convolve.kernels.depthwise import _Sizes, convolve, load, supports
from convolve.layers.blocks import SamePadConv2d, same_padding

pytestmark = pytest.mark.skipif(isinstance(load(), Unavailable), reason="no native code on this machine")

KINDS = [(side, stride) for side in depthwise.KERNEL_SIZES for stride in depthwise.STRIDES]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def draw(images, channels, height, width, side, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(images, channels, height, width).contiguous(memory_format=torch.channels_last)
    return x, torch.randn(channels, 1, side, side)


def learn(run, x, weight, stride):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = run(x, weight, stride)
    generator = torch.Generator().manual_seed(7)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    return y.detach(), x.grad, weight.grad


def convolve_by_torch(x, weight, stride):
    return functional.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=len(weight))


@pytest.mark.parametrize(("side", "stride"), KINDS)
@pytest.mark.parametrize("shape", [(3, 16, 9, 12), (1, 8, 7, 7), (9, 40, 5, 4), (2, 24, 1, 1), (2, 16, 2, 31)])
def test_values_and_gradients_are_those_of_torch(side, stride, shape):
    if not supports(shape[1], side, stride):
        pytest.skip(f"{shape[1]} channels are no multiple of this CPU's vectors")
    x, weight = draw(*shape, side)
    ours = learn(convolve, x, weight, stride)
    theirs = learn(convolve_by_torch, x.double(), weight.double(), stride)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-6 * other.abs().max().item())


def convolve_same(x, weight, stride):
    return convolve(x, weight, stride, starts(x, weight, stride))


def starts(x, weight, stride):
    return tuple(same_padding(side, weight.shape[-1], stride)[0] for side in x.shape[2:])


def convolve_same_by_torch(x, weight, stride):
    layer = SamePadConv2d(len(weight), len(weight), weight.shape[-1], stride, groups=len(weight), bias=False)
    return functional_call(layer, {"weight": weight}, (x,))


@pytest.mark.parametrize(("side", "stride"), KINDS)
@pytest.mark.parametrize("shape", [(3, 16, 9, 12), (3, 32, 12, 9), (9, 48, 4, 4), (2, 16, 1, 2), (2, 16, 2, 31)])
def test_the_padding_of_tensorflow_is_understood(side, stride, shape):
    x, weight = draw(*shape, side)
    ours = learn(convolve_same, x, weight, stride)
    theirs = learn(convolve_same_by_torch, x.double(), weight.double(), stride)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-6 * other.abs().max().item())


def test_a_padding_that_c_cannot_compute_is_rejected():
    x, weight = draw(1, 16, 8, 8, 3)
    for stride, before in ((1, (0, 1)), (2, (1, 2)), (2, (-1, 1))):
        with pytest.raises(AssertionError, match="not for native code"):
            convolve(x, weight, stride, before)


@pytest.mark.parametrize(("side", "stride"), KINDS)
def test_results_do_not_depend_on_the_number_of_threads(side, stride, threads):
    x, weight = draw(10, 48, 8, 6, side)
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(learn(convolve, x, weight, stride))
    assert all(torch.equal(one, other) for again in found[1:] for one, other in zip(found[0], again, strict=True))


@pytest.mark.parametrize(("side", "stride"), KINDS)
def test_an_image_has_the_same_bits_in_any_batch(side, stride):
    x, weight = draw(5, 16, 10, 10, side)
    together = convolve(x, weight, stride)
    assert all(torch.equal(convolve(x[i : i + 1], weight, stride), together[i : i + 1]) for i in range(5))


def test_memory_of_another_layout_is_understood():
    x, weight = draw(2, 16, 6, 5, 3)
    expected = learn(convolve, x, weight, 1)
    found = learn(convolve, x.contiguous(), weight.to(memory_format=torch.channels_last), 1)
    assert all(map(torch.equal, expected, found))


def test_an_empty_batch_has_gradients_of_zeros(memory_of_nan):
    x = torch.empty(0, 32, 5, 5, requires_grad=True)
    weight = torch.rand(32, 1, 3, 3, requires_grad=True)
    convolve(x, weight, 1).sum().backward()
    assert x.grad.shape == x.shape and torch.equal(weight.grad, torch.zeros_like(weight))


def test_a_frozen_input_has_no_gradient():
    x, weight = draw(2, 16, 6, 6, 5)
    weight.requires_grad_()
    convolve(x, weight, 2).sum().backward()
    assert x.grad is None and weight.grad.isfinite().all()


@pytest.mark.parametrize("run", [convolve_by_torch, convolve_same_by_torch])
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize(("side", "stride"), KINDS)
def test_no_memory_outside_the_buffers_is_touched(run, lanes, side, stride):
    """Every tensor lies between guards, and scratch memory starts as NaN, which exposes unwritten values."""
    kernel = load(f"-DLANES={lanes}")
    assert kernel.constant("lanes") == lanes
    images, channels, height, width = 3, 3 * lanes, 7, 10
    x, weight = draw(images, channels, height, width, side)
    y, _, _ = expected = learn(run, x, weight, stride)
    missing = [0, 0] if run is convolve_by_torch else [side // 2 - zeros for zeros in starts(x, weight, stride)]
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).contiguous(memory_format=torch.channels_last)
    sizes = _Sizes(images, height, width, channels, side, stride, *y.shape[-2:], *missing)
    taps = weight.reshape(channels, -1).T.contiguous()
    scratch = guarded(kernel.scratch(sizes, 1) // 4)
    made = [guarded(tensor.numel()) for tensor in expected]
    at = [memory[GUARD:].data_ptr() for memory in (*made, scratch)]
    kernel.forward(sizes, x.data_ptr(), taps.data_ptr(), at[0], at[3], 1, None)
    kernel.backward(sizes, x.data_ptr(), taps.data_ptr(), g.data_ptr(), *at[1:], 1, None)
    for memory in (*made, scratch):
        assert memory[:GUARD].eq(MARK).all() and memory[-GUARD:].eq(MARK).all()
    dw = made[2][GUARD:-GUARD].view(-1, channels).T.reshape(weight.shape)
    torch.testing.assert_close(dw, expected[2], rtol=1e-4, atol=1e-4)
    for memory, tensor in zip(made[:2], expected[:2], strict=True):
        n, c, h, w = tensor.shape
        found = memory[GUARD:-GUARD].view(n, h, w, c).permute(0, 3, 1, 2)
        torch.testing.assert_close(found, tensor, rtol=1e-5, atol=1e-5)


GUARD, MARK = 64, 12345.0


def guarded(size):
    memory = torch.full((size + 2 * GUARD,), MARK)
    memory[GUARD:-GUARD] = torch.nan
    return memory
