"""Networks whose layers are computed by native code where there is some: the same function, in fewer passes."""

from torch import Tensor, nn
from torch.nn import functional

from convolve.kernels import depthwise, winograd
from convolve.kernels.code import are_plain
from convolve.models.fusing import fuse_pools, use_native_norms
from convolve.models.network import Network
from convolve.models.units import as_pair


class WinogradConv2d(nn.Conv2d):
    """A 3x3 convolution that saves multiplications on images of a size for which that pays."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve."""
        if not winograd.suits_image(x):
            return functional.conv2d(x, self.weight, self.bias, padding=1)
        return _add_bias(winograd.convolve(x, self.weight), self.bias)

    @staticmethod
    def replaces(conv: nn.Conv2d) -> bool:
        """Whether it is one that this computes."""
        return (
            (conv.kernel_size, conv.stride, conv.groups) == ((3, 3), (1, 1), 1)
            and conv.padding in ((1, 1), "same")
            and winograd.suits_channels(conv.in_channels, conv.out_channels)
        )


class DepthwiseConv2d(nn.Conv2d):
    """A convolution with one filter for each channel, whose gradients take fewer walks over memory."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve."""
        if not are_plain(x, self.weight):
            return super().forward(x)
        return _add_bias(depthwise.convolve(x, self.weight, self.stride[0]), self.bias)

    @staticmethod
    def replaces(conv: nn.Conv2d) -> bool:
        """Whether it is one that this computes."""
        (side, width), (stride, across) = conv.kernel_size, as_pair(conv.stride)
        return (
            conv.groups == conv.in_channels == conv.out_channels
            and (side, stride) == (width, across)
            and conv.padding == (side // 2, side // 2)
            and depthwise.suits(conv.in_channels, side, stride)
        )


def use_native_layers(network: Network) -> list[str]:
    """Let native code compute what it can of a network, forward and backward; returns the names of those layers.

    Layers are replaced by ones that share their parameters.
    """
    fused = fuse_pools(network) + use_native_norms(network)
    found = {name: kind for name, module in network.named_modules() if (kind := _find_kind(module))}
    for name, kind in found.items():
        parent, _, last = name.rpartition(".")
        owner = network.get_submodule(parent)
        setattr(owner, last, _replace(getattr(owner, last), kind))
    return fused + list(found)


def _find_kind(module: nn.Module) -> type[nn.Conv2d] | None:
    """The native layer that computes what a module does."""
    if type(module) is not nn.Conv2d or module.dilation != (1, 1) or module.padding_mode != "zeros":
        return None
    return next((kind for kind in (WinogradConv2d, DepthwiseConv2d) if kind.replaces(module)), None)


def _replace(conv: nn.Conv2d, kind: type[nn.Conv2d]) -> nn.Conv2d:
    channels, has_bias = (conv.in_channels, conv.out_channels), conv.bias is not None
    options = {"stride": conv.stride, "padding": conv.padding, "groups": conv.groups, "bias": has_bias}
    made = kind(*channels, conv.kernel_size, **options, device="meta")  # type: ignore[arg-type]
    made.weight, made.bias = conv.weight, conv.bias
    return made.train(conv.training)


def _add_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias[:, None, None]
