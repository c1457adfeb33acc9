"""Blocks that several model families share: conv-norm-activation, squeeze-excitation, shortcut without weights.

Two ways to pad a convolution with an odd kernel k and stride s, both with ceil(n / s) outputs for n inputs:

    symmetric    (k - 1) / 2 on both sides: PyTorch's models
    same         max(0, (ceil(n / s) - 1) s + k - n) in total, the smaller half first: TensorFlow's models

They differ only if s > 1 and the total is odd, for example 3x3 with stride 2 on an even side: 0 before and 1 after.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from convolve.config.schema import Padding
from convolve.layers.chain import run_chain
from convolve.layers.norm import NormFactory

Activation = Callable[[], nn.Module]


class PaddedShortcut(nn.Module):
    """Shortcut "A" of He et al. 2016: every second pixel, and zeros for the missing channels."""

    def __init__(self, missing: int, stride: int) -> None:
        super().__init__()
        self.missing = missing
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Subsample.apply(x, self.missing, self.stride)  # type: ignore[no-untyped-call]
        return out


class _Subsample(torch.autograd.Function):
    """A slice, padded. Its gradient has the memory layout of x; that of torch is contiguous, and slow to add."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, missing: int, stride: int) -> Tensor:
        return functional.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, 0, missing))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        x, _, ctx.stride = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        dx = torch.zeros_like(x)
        dx[:, :, :: ctx.stride, :: ctx.stride] = gradients[0][:, : x.shape[1]]
        return dx, None, None


class SqueezeExcitation(nn.Module):
    """Scales each channel by a gate computed from the means of all channels."""

    def __init__(self, channels: int, squeezed: int, activation: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.activation = activation
        self.scale_activation = gate

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x)))))
        return gate * x


class SamePadConv2d(nn.Conv2d):
    """A convolution with TensorFlow's padding "same", computed for each input size."""

    def forward(self, x: Tensor) -> Tensor:
        (top, bottom), (left, right) = (
            same_padding(side, kernel, stride)
            for side, kernel, stride in zip(x.shape[2:], self.kernel_size, self.stride, strict=True)
        )
        padding = (top, left)
        if (top, left) != (bottom, right):
            x, padding = functional.pad(x, (left, right, top, bottom)), (0, 0)
        return functional.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)


def same_padding(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return the padding "same" of one axis, before and after."""
    total = max(0, (-(-side // stride) - 1) * stride + kernel - side)
    return total // 2, total - total // 2


class ConvNorm(nn.Sequential):
    """Convolution, norm and activation."""

    def forward(self, x: Tensor) -> Tensor:
        return run_chain(list(self), x)


def conv_norm(
    channels: tuple[int, int],
    kernel: int,
    norms: NormFactory,
    *,
    stride: int = 1,
    groups: int = 1,
    activation: Activation | None = None,
    padding: Padding = "symmetric",
) -> nn.Sequential:
    """Build a convolution without bias (padded to keep the size at stride 1), a norm, and an optional activation."""
    inputs, outputs = channels
    # With stride 1 both paddings are equal, and native kernels compute the plain layer.
    kind = SamePadConv2d if padding == "same" and stride > 1 else nn.Conv2d
    conv = kind(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    norm = norms.create(outputs)
    if activation is None:
        return nn.Sequential(conv, norm)
    return ConvNorm(conv, norm, norms.activate(norm, activation()))


def round_width(width: float, divisor: int = 8) -> int:
    """Round to the nearest multiple of `divisor`, but never below 90 % of the width."""
    rounded = max(divisor, int(width + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * width else rounded
