"""Blocks that several model families share: conv-norm-activation, squeeze-excitation, shortcut without weights."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

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
        x = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(x, (0, 0, 0, 0, 0, self.missing))


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
) -> nn.Sequential:
    """Build a convolution without bias (padded to keep the size at stride 1), a norm, and an optional activation."""
    inputs, outputs = channels
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    norm = norms.create(outputs)
    if activation is None:
        return nn.Sequential(conv, norm)
    return ConvNorm(conv, norm, norms.activate(norm, activation()))


def round_width(width: float, divisor: int = 8) -> int:
    """Round to the nearest multiple of `divisor`, but never below 90 % of the width."""
    rounded = max(divisor, int(width + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * width else rounded
