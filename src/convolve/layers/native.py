"""Networks whose layers are computed by native code where there is some: the same function, in fewer passes.

Parts of a network that native code does in fewer passes: a convolution with its 2x2 max-pool and ReLU, batch norms.

The network keeps its blocks, names and parameters; only what a pass through three neighbors computes with changes. It
goes through the layers themselves wherever somebody looks between them (hooks), where the graph is wanted (tracing,
export) and where native code has no answer (other formats and devices).

Blocks that belong together: a convolution with its 2x2 max-pool and ReLU, which native code does at once.

Nothing parts them, neither a pipeline stage nor an activation that is kept, and whether native code is there or not: so
a network has the same bits however it is cut.

Whether somebody looks at a module, so that it must not be passed over by code that does several at once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from convolve.kernels import batch_norm, conv_pool, depthwise, winograd
from convolve.kernels.binding import are_plain
from convolve.kernels.conv_pool import Geometry, conv_pool_relu
from convolve.layers.batch_norm import BatchNorm2d


@runtime_checkable
class Blocks(Protocol):
    """A model made of named blocks, of which neighbors can be computed together."""

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The blocks by name, in order."""

    def merge(self, names: Sequence[str], operation: Callable[[Sequence[nn.Module], Tensor], Tensor | None]) -> None:
        """Apply neighboring blocks together."""


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


def use_native_layers(network: nn.Module) -> list[str]:
    """Let native code compute what it can of a network, forward and backward; returns the names of those layers.

    Layers are replaced by ones that share their parameters.
    """
    fused = fuse_conv_pool_relu(network) + use_native_norms(network)
    found = {name: kind for name, module in network.named_modules() if (kind := _native_class(module))}
    for name, kind in found.items():
        parent, _, last = name.rpartition(".")
        owner = network.get_submodule(parent)
        setattr(owner, last, _replace(getattr(owner, last), kind))
    return fused + list(found)


def _native_class(module: nn.Module) -> type[nn.Conv2d] | None:
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


def fuse_conv_pool_relu(network: nn.Module) -> list[str]:
    """Let native code do every convolution with pool and ReLU that it can; returns the names of their blocks."""
    if not isinstance(network, Blocks):
        return []
    trios = find_conv_pool_relu(network.blocks)
    if not trios or conv_pool.load() is None:
        return []
    for trio in trios:
        network.merge(trio, _run_fused)
    return [name for trio in trios for name in trio]


def use_native_norms(network: nn.Module) -> list[str]:
    """Let native code normalize in training; returns the names of the norms."""
    norms = {name: module for name, module in network.named_modules() if isinstance(module, BatchNorm2d)}
    if not norms or batch_norm.load() is None:
        return []
    for norm in norms.values():
        norm.native = True
    return list(norms)


def _run_fused(blocks: Sequence[nn.Module], x: Tensor) -> Tensor | None:
    conv, pool, _ = blocks
    assert isinstance(conv, nn.Conv2d) and isinstance(pool, nn.MaxPool2d), "blocks were looked at before"
    geometry = Geometry(as_pair(conv.padding), pool.ceil_mode)
    if not conv_pool.can_run(x, conv.weight, geometry) or _is_traced():
        return None
    return conv_pool_relu(x, conv.weight, conv.bias, geometry)


def _is_traced() -> bool:
    """Whether operations are recorded, or computed in another format, as they pass."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
    )


ConvPoolReLU = tuple[str, str, str]


def find_conv_pool_relu(blocks: Mapping[str, nn.Module]) -> list[ConvPoolReLU]:
    """The names of such blocks, in order."""
    names = list(blocks)
    return [
        trio
        for trio in zip(names, names[1:], names[2:], strict=False)
        if _is_conv_pool_relu(*(blocks[name] for name in trio))
    ]


def as_pair(value: object) -> tuple[int, int]:
    """Height and width of a layer's setting that may be one number for both."""
    if isinstance(value, int):
        return value, value
    assert isinstance(value, tuple) and len(value) == 2, "settings of torch's layers are numbers or pairs"
    return value


def _is_conv_pool_relu(conv: nn.Module, pool: nn.Module, act: nn.Module) -> bool:
    return _is_plain_convolution(conv) and _is_2x2_pool(pool) and type(act) is nn.ReLU


def _is_plain_convolution(conv: nn.Module) -> bool:
    return (
        isinstance(conv, nn.Conv2d)
        and conv.stride == (1, 1)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)
    )


def _is_2x2_pool(pool: nn.Module) -> bool:
    return (
        type(pool) is nn.MaxPool2d
        and as_pair(pool.kernel_size) == as_pair(pool.stride) == (2, 2)
        and as_pair(pool.padding) == (0, 0)
        and as_pair(pool.dilation) == (1, 1)
        and not pool.return_indices
    )
