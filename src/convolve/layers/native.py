"""Native kernels in a model: one pattern for each kernel, and one pass that rewrites any module.

A `KernelPattern` matches modules that its kernel computes and names the layer that replaces the first of them. The pass
replaces the layer's class in place, so a layer keeps its identity, parameters, buffers, hooks and mode, and copies of
the model stay native. Each native layer falls back to PyTorch if the kernel cannot take an input (other formats,
devices and sizes) or if the graph is recorded (tracing, export).

Modules are matched along chains, in which the order of execution is known: the children of `nn.Sequential`, and the
block groups that a model declares. All other modules are matched one by one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from convolve.kernels import batch_norm, conv_pool, depthwise, winograd
from convolve.kernels.binding import Kernel
from convolve.kernels.build import Unavailable
from convolve.kernels.conv_pool import Geometry, conv_pool_relu
from convolve.layers.batch_norm import BatchNorm2d
from convolve.layers.blocks import SamePadConv2d, same_padding
from convolve.layers.chain import FusingLayer, run_chain
from convolve.layers.hooks import has_hooks

MIN_NORM_ELEMENTS = 1 << 15  # elements from which the native batch norm is faster
ACTIVATIONS: dict[type[nn.Module], batch_norm.Activation] = {nn.ReLU: "relu", nn.ReLU6: "relu6", nn.SiLU: "silu"}


@dataclass(frozen=True)
class KernelPattern:
    """Which modules a kernel computes, on which CPUs, and the layer that calls it.

    `match` returns how many modules at the start of a chain the kernel computes, judging by their settings. `supports`
    checks the first of them for this CPU, if the kernel is available. `replace` becomes its class.
    """

    load: Callable[[], Kernel | Unavailable]
    match: Callable[[Sequence[nn.Module]], int]
    supports: Callable[[nn.Module], bool]
    replace: type[nn.Module]


@runtime_checkable
class HasBlockGroups(Protocol):
    """A model that applies groups of modules in order."""

    @property
    def block_groups(self) -> Sequence[Mapping[str, nn.Module]]:
        """The groups in order, modules by name."""


class ConvPoolReLU(FusingLayer, nn.Conv2d):
    """A convolution that can compute the 2x2 max-pool and ReLU after it."""

    replaces: ClassVar[type[nn.Module]] = nn.Conv2d

    def fuse(self, following: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, int] | None:
        if not _match_conv_pool_relu((self, *following)) or any(map(has_hooks, (self, *following[:2]))):
            return None
        geometry = Geometry(_as_pair(self.padding), bool(following[0].ceil_mode))
        if not conv_pool.can_run(x, self.weight, self.bias, geometry) or _is_traced():
            return None
        return conv_pool_relu(x, self.weight, self.bias, geometry), 2


class NativeBatchNorm2d(FusingLayer, BatchNorm2d):
    """A batch norm that can compute the activation after it, in passes that have gradients."""

    replaces: ClassVar[type[nn.Module]] = BatchNorm2d

    def forward(self, x: Tensor) -> Tensor:
        return self._run_native(x, "none") if self._can_run(x) else super().forward(x)

    def fuse(self, following: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, int] | None:
        activation = ACTIVATIONS.get(type(following[0])) if following else None
        if activation is None or not self._can_run(x) or any(map(has_hooks, (self, following[0]))):
            return None
        return self._run_native(x, activation), 1

    def _can_run(self, x: Tensor) -> bool:
        return (
            batch_norm.can_run(x, self.weight, self.bias)
            and x.numel() >= MIN_NORM_ELEMENTS
            and self._span is None
            and (self.training or self._learns_with_frozen_statistics())
        )

    def _learns_with_frozen_statistics(self) -> bool:
        """Judge by the weight: whether the input has a gradient depends on where a pipeline is cut."""
        learns = torch.is_grad_enabled() and self.weight.requires_grad and not _is_traced()
        return learns and self.running_mean is not None and self.running_mean.dtype == torch.float32

    def _run_native(self, x: Tensor, activation: batch_norm.Activation) -> Tensor:
        if not self.training:
            assert self.running_mean is not None and self.running_var is not None, "statistics are tracked"
            statistics = torch.stack((self.running_mean, self.running_var))
            return batch_norm.normalize_frozen(x, self.weight, self.bias, statistics, self.eps, activation)
        out, statistics = batch_norm.normalize(x, self.weight, self.bias, self.eps, activation)
        self._add_statistics(x, statistics, 1.0)
        return out


class WinogradConv2d(nn.Conv2d):
    """A 3x3 convolution that saves multiplications on images large enough."""

    replaces: ClassVar[type[nn.Module]] = nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        if not winograd.can_run(x, self.weight):
            return functional.conv2d(x, self.weight, self.bias, padding=1)
        return _add_bias(winograd.convolve(x, self.weight), self.bias)


class DepthwiseConv2d(nn.Conv2d):
    """A convolution with one filter for each channel."""

    replaces: ClassVar[type[nn.Module]] = nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        if not depthwise.can_run(x, self.weight):
            return super().forward(x)
        return _add_bias(depthwise.convolve(x, self.weight, self.stride[0]), self.bias)


class SameDepthwiseConv2d(SamePadConv2d):
    """The same with TensorFlow's padding."""

    replaces: ClassVar[type[nn.Module]] = SamePadConv2d

    def forward(self, x: Tensor) -> Tensor:
        if not depthwise.can_run(x, self.weight):
            return super().forward(x)
        top, left = (
            same_padding(side, kernel, stride)[0]
            for side, kernel, stride in zip(x.shape[2:], self.kernel_size, self.stride, strict=True)
        )
        return _add_bias(depthwise.convolve(x, self.weight, self.stride[0], (top, left)), self.bias)


class ChainSequential(nn.Sequential):
    """A container that lets its layers fuse."""

    def forward(self, x: Tensor) -> Tensor:
        return run_chain(list(self), x)


_PLAIN_FORWARDS = (nn.Sequential.forward, ChainSequential.forward)


def use_native_layers(model: nn.Module) -> list[str]:
    """Replace layers that native kernels compute, forward and backward. Returns the names of all modules computed."""
    native: list[str] = []
    for names, modules in list(_chains(model)):
        position = 0
        while position < len(modules):
            count = _replace(modules[position:])
            native += names[position : position + count]
            position += count or 1
    for module in model.modules():
        if type(module) is nn.Sequential and any(isinstance(child, FusingLayer) for child in module):
            module.__class__ = ChainSequential
    return native


def count_fused(modules: Sequence[nn.Module]) -> int:
    """Return how many modules at the start of a chain one kernel may compute; they must stay together."""
    if _match_conv_pool_relu(modules):
        return 3
    pair = len(modules) > 1 and _match_batch_norm(modules) and type(modules[1]) in ACTIVATIONS
    return 2 if pair else 1


def explain_missing(model: nn.Module) -> str | None:
    """Return why kernels that match layers of a model are unavailable; None if none is missing."""
    kernels = (
        pattern.load()
        for _, modules in _chains(model)
        for position in range(len(modules))
        for pattern in PATTERNS
        if pattern.match(modules[position:])
    )
    reasons = dict.fromkeys(kernel.reason for kernel in kernels if isinstance(kernel, Unavailable))
    return "; ".join(reasons) or None


def _chains(model: nn.Module) -> Iterator[tuple[list[str], list[nn.Module]]]:
    """Yield names and modules that run one after the other; every module of a model once."""
    chained: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module not in chained:
            yield [path], [module]
        groups: Sequence[Mapping[str, nn.Module]] = ()
        if isinstance(module, nn.Sequential) and type(module).forward in _PLAIN_FORWARDS:
            groups = [dict(module.named_children())]
        elif isinstance(module, HasBlockGroups):
            groups = module.block_groups
        for group in groups:
            if chained.issuperset(group.values()):
                continue
            chained.update(group.values())
            yield [f"{path}.{name}".lstrip(".").replace("/", ".") for name in group], list(group.values())


def _replace(modules: Sequence[nn.Module]) -> int:
    """Apply the first pattern that matches the start of a chain. Returns how many modules its kernel computes."""
    for pattern in PATTERNS:
        count = pattern.match(modules)
        if count and isinstance(pattern.load(), Kernel) and pattern.supports(modules[0]):
            modules[0].__class__ = pattern.replace
            return count
    return 0


def _match_conv_pool_relu(modules: Sequence[nn.Module]) -> int:
    if len(modules) < 3:
        return 0
    conv, pool, activation = modules[:3]
    matches = (
        _is_plain_conv(conv, ConvPoolReLU)
        and conv.stride == (1, 1)
        and conv.groups == 1
        and not isinstance(conv.padding, str)
        and _is_2x2_pool(pool)
        and type(activation) is nn.ReLU
    )
    return 3 if matches else 0


def _match_batch_norm(modules: Sequence[nn.Module]) -> int:
    norm = modules[0]
    return int(isinstance(norm, BatchNorm2d) and type(norm) in (BatchNorm2d, NativeBatchNorm2d) and norm.affine)


def _match_3x3(modules: Sequence[nn.Module]) -> int:
    conv = modules[0]
    return int(
        _is_plain_conv(conv, WinogradConv2d)
        and (conv.kernel_size, conv.stride, conv.groups) == ((3, 3), (1, 1), 1)
        and conv.padding in ((1, 1), "same")
    )


def _match_depthwise(modules: Sequence[nn.Module]) -> int:
    conv = modules[0]
    return int(_is_plain_conv(conv, DepthwiseConv2d) and _is_square_depthwise(conv))


def _match_same_depthwise(modules: Sequence[nn.Module]) -> int:
    conv = modules[0]
    return int(_is_plain_conv(conv, SameDepthwiseConv2d, SamePadConv2d) and _is_square_depthwise(conv))


def _is_square_depthwise(conv: nn.Conv2d) -> bool:
    (height, width), (stride, across) = conv.kernel_size, _as_pair(conv.stride)
    return (
        conv.groups == conv.in_channels == conv.out_channels
        and (height, stride) == (width, across)
        and conv.padding == (height // 2, height // 2)
    )


def _is_plain_conv(
    module: nn.Module, native: type[nn.Module], layer: type[nn.Module] = nn.Conv2d
) -> TypeGuard[nn.Conv2d]:
    return (
        isinstance(module, nn.Conv2d)
        and type(module) in (layer, native)
        and module.dilation == (1, 1)
        and module.padding_mode == "zeros"
    )


def _is_2x2_pool(pool: nn.Module) -> bool:
    return (
        type(pool) is nn.MaxPool2d
        and _as_pair(pool.kernel_size) == _as_pair(pool.stride) == (2, 2)
        and _as_pair(pool.padding) == (0, 0)
        and _as_pair(pool.dilation) == (1, 1)
        and not pool.return_indices
    )


def _as_pair(value: object) -> tuple[int, int]:
    """Return height and width of a setting that may be one number for both."""
    if isinstance(value, int):
        return value, value
    assert isinstance(value, tuple) and len(value) == 2, "settings of torch's layers are numbers or pairs"
    return value


def _is_traced() -> bool:
    """Check whether operations are recorded or computed in another format."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _add_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias[:, None, None]


def _supports_3x3(conv: nn.Module) -> bool:
    assert isinstance(conv, nn.Conv2d), "matched"
    return winograd.supports(conv.in_channels, conv.out_channels)


def _supports_depthwise(conv: nn.Module) -> bool:
    assert isinstance(conv, nn.Conv2d), "matched"
    return depthwise.supports(conv.in_channels, conv.kernel_size[0], conv.stride[0])


PATTERNS = (
    KernelPattern(conv_pool.load, _match_conv_pool_relu, lambda conv: True, ConvPoolReLU),
    KernelPattern(batch_norm.load, _match_batch_norm, lambda norm: True, NativeBatchNorm2d),
    KernelPattern(winograd.load, _match_3x3, _supports_3x3, WinogradConv2d),
    KernelPattern(depthwise.load, _match_depthwise, _supports_depthwise, DepthwiseConv2d),
    KernelPattern(depthwise.load, _match_same_depthwise, _supports_depthwise, SameDepthwiseConv2d),
)
