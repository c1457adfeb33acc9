"""Networks whose layers are computed by native code where there is some: the same function, in fewer passes."""

from torch import Tensor, nn
from torch.nn import functional

from convolve.kernels import winograd
from convolve.models.fusing import fuse_pools, use_native_norms
from convolve.models.network import Network


class WinogradConv2d(nn.Conv2d):
    """A 3x3 convolution that saves multiplications on images of a size for which that pays."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve."""
        if not winograd.suits_image(x):
            return functional.conv2d(x, self.weight, self.bias, padding=1)
        out = winograd.convolve(x, self.weight)
        return out if self.bias is None else out + self.bias[:, None, None]


def use_native_layers(network: Network) -> list[str]:
    """Let native code compute what it can of a network, forward and backward; returns the names of those layers.

    Layers are replaced by ones that share their parameters.
    """
    fused = fuse_pools(network) + use_native_norms(network)
    found = [name for name, module in network.named_modules() if _suits(module)]
    for name in found:
        parent, _, last = name.rpartition(".")
        owner = network.get_submodule(parent)
        setattr(owner, last, _replace(getattr(owner, last)))
    return fused + found


def _suits(module: nn.Module) -> bool:
    return (
        type(module) is nn.Conv2d
        and (module.kernel_size, module.stride, module.dilation) == ((3, 3), (1, 1), (1, 1))
        and module.padding in ((1, 1), "same")
        and module.padding_mode == "zeros"
        and module.groups == 1
        and winograd.suits_channels(module.in_channels, module.out_channels)
    )


def _replace(conv: nn.Conv2d) -> WinogradConv2d:
    made = WinogradConv2d(conv.in_channels, conv.out_channels, 3, padding=1, bias=conv.bias is not None, device="meta")
    made.weight, made.bias = conv.weight, conv.bias
    return made.train(conv.training)
