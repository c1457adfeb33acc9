"""Half partials against a slow exact reference: fractions, one dot product at a time."""

from fractions import Fraction

import pytest
import torch
from torch.nn import functional

from convolve.numerics.formats import BF16, FP16, FP32
from convolve.numerics.half_accumulation import CHUNK, Convolution, accumulate, multiply, multiply_add
from convolve.numerics.rounding import Grid, rounded


def round_exactly(value, target):
    """Round a fraction to the nearest number of a format, ties to even, by arithmetic on fractions alone."""
    if value == 0:
        return Fraction(0)
    size, exponent = abs(value), 0
    while Fraction(2) ** exponent > size:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    step = Fraction(2) ** (max(exponent, 1 - target.bias) - target.mantissa_bits)
    nearest = round(size / step) * step
    assert nearest <= Fraction(target.largest), "the reference is for values inside the range"
    return nearest if value > 0 else -nearest


def dot_exactly(a, b, target):
    acc = Fraction(0)
    for start in range(0, len(a), CHUNK):
        for x, y in zip(a[start : start + CHUNK], b[start : start + CHUNK], strict=True):
            acc = round_exactly(acc + Fraction(x) * Fraction(y), FP32)
        acc = round_exactly(acc, target)
    return float(acc)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 30.0])
@pytest.mark.parametrize("target", [FP16, BF16], ids=lambda target: target.name)
def test_a_dot_product_equals_the_exact_reference(target, scale):
    draw = torch.Generator().manual_seed(3)
    a, b = (rounded(torch.randn(*shape, generator=draw) * scale, Grid(target)) for shape in ((5, 83), (83, 4)))
    result = accumulate(a, b, Grid(target))
    assert torch.equal(result, multiply(a, b, Grid(target)))
    for row in range(5):
        for column in range(4):
            assert result[row, column].item() == dot_exactly(a[row].tolist(), b[:, column].tolist(), target)


def test_a_bias_is_added_last_and_rounded_separately():
    grid = Grid(FP16)
    a, b, bias = (rounded(torch.randn(*shape), grid) for shape in ((3, 40), (40, 6), (6,)))
    assert torch.equal(multiply_add(bias, a, b, grid), rounded(multiply(a, b, grid) + bias, grid))


def test_sixteen_bit_accumulation_stalls_and_fp32_does_not():
    """4096 ones: fp16 counts in twos from 2048 on, so adding 16 at a time still works, adding 1 at the end does not."""
    ones, tail = torch.ones(1, 4097), torch.ones(4097, 1)
    assert multiply(ones, tail, Grid(FP16)).item() == 4096
    assert multiply(torch.ones(1, 4096), torch.ones(4096, 1), Grid(FP16)).item() == 4096
    assert (ones @ tail).item() == 4097


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups", "size"),
    [(1, 0, 1, 1, 3), (2, 1, 1, 1, 3), (1, 2, 2, 1, 3), (2, 0, 1, 2, 2), (3, 1, 1, 4, 3), (2, 0, 1, 1, 1)],
)
def test_convolutions_and_their_gradients_are_those_of_torch_but_for_rounding(stride, padding, dilation, groups, size):
    draw = torch.Generator().manual_seed(0)
    x = rounded(torch.randn(2, 4, 9, 8, generator=draw), Grid(FP16)).requires_grad_()
    weight = rounded(torch.randn(8, 4 // groups, size, size, generator=draw), Grid(FP16)).requires_grad_()
    bias = torch.randn(8, generator=draw).requires_grad_()
    expected = functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
    both = [stride] * 2, [padding] * 2, [dilation] * 2
    convolution = Convolution(*both, groups, Grid(FP16))
    output = convolution.forward(x.detach(), weight.detach(), bias.detach(), None)
    assert torch.allclose(output, expected, atol=0.1)
    grad = rounded(torch.randn(expected.shape, generator=draw), Grid(FP16))
    expected.backward(grad)
    gradients = convolution.backward(grad, x.detach(), weight.detach(), (True, True, True), None)
    for one, two in zip(gradients, (x.grad, weight.grad, bias.grad), strict=True):
        assert one.shape == two.shape
        assert torch.allclose(one, two, atol=0.2)
