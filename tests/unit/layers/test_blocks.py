"""TensorFlow's padding "same" and the shortcut without weights, against independent definitions."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from convolve.layers.blocks import PaddedShortcut, SamePadConv2d, conv_norm, same_padding
from convolve.layers.norm import NormFactory

NORMS = NormFactory("batch", 1, 1e-3, 0.99)


def reach_padding(side, kernel, stride):
    """Return the padding by counting: the last window must start at the last multiple of the stride below the side."""
    last_start = max(start for start in range(0, side, stride))
    total = max(0, last_start + kernel - side)
    return [total // 2, total - total // 2]


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
def test_same_padding_covers_every_start_of_a_window(kernel, stride):
    for side in range(1, 40):
        assert list(same_padding(side, kernel, stride)) == reach_padding(side, kernel, stride)


def test_same_padding_of_the_published_example():
    assert [same_padding(side, 3, 2) for side in (224, 65)] == [(0, 1), (1, 1)]
    assert [same_padding(side, 5, 2) for side in (56, 33)] == [(1, 2), (2, 2)]


@pytest.mark.parametrize(("height", "width"), [(8, 8), (9, 9), (8, 9), (9, 8)])
@pytest.mark.parametrize("kernel", [3, 5])
def test_a_padded_convolution_equals_explicit_zeros(height, width, kernel):
    layer = SamePadConv2d(3, 4, kernel, 2, padding=kernel // 2, bias=False)
    x = torch.randn(2, 3, height, width)
    top, bottom = reach_padding(height, kernel, 2)
    left, right = reach_padding(width, kernel, 2)
    padded = torch.zeros(2, 3, height + top + bottom, width + left + right)
    padded[:, :, top : top + height, left : left + width] = x
    expected = functional.conv2d(padded, layer.weight, stride=2)
    assert torch.allclose(layer(x), expected, atol=1e-6)
    assert layer(x).shape[2:] == ((height + 1) // 2, (width + 1) // 2)


def test_only_layers_with_a_stride_need_another_class():
    assert type(conv_norm((8, 8), 3, NORMS, stride=2, padding="same")[0]) is SamePadConv2d
    assert type(conv_norm((8, 8), 3, NORMS, padding="same")[0]) is nn.Conv2d
    assert type(conv_norm((8, 8), 3, NORMS, stride=2)[0]) is nn.Conv2d


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_padded_shortcut_is_a_slice_and_its_gradient_keeps_the_memory_layout(layout, stride):
    x = torch.randn(2, 4, 7, 6).contiguous(memory_format=layout).requires_grad_()
    y = PaddedShortcut(3, stride)(x)
    expected = functional.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, 0, 3))
    assert torch.equal(y, expected)
    g = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, g)
    assert torch.equal(dx, *torch.autograd.grad(expected, x, g))
    assert dx.is_contiguous(memory_format=layout)


def test_a_padded_shortcut_takes_part_in_function_transforms():
    shortcut = PaddedShortcut(1, 2)
    x = torch.randn(5, 2, 3, 4, 4, dtype=torch.float64)
    assert torch.equal(torch.func.vmap(shortcut)(x), torch.stack([shortcut(one) for one in x]))
    assert torch.autograd.gradgradcheck(shortcut, x[0].requires_grad_())
