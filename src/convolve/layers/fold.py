"""Fold batch norms into adjacent convolutions: the same function in evaluation, with fewer passes over memory.

The arithmetic: in evaluation a batch norm is s x + t in each channel, with s = gamma / sqrt(variance + epsilon) and
t = beta - s mean. So, for a convolution with weights W and bias b,

    norm(conv(x))            is the convolution with weights s W and bias s b + t
    norm(max-pool(conv(x)))  is the max-pool of that one, if no s is negative: a maximum commutes with an increasing
                             function
    conv(norm(x))            is the convolution with weights W s and bias b + sum(W t), if it has no padding

The graph of the model determines which one applies. A norm without an adjacent convolution, or whose input has other
users, is not folded. Neither is a model with data-dependent control flow, which has no graph. Subclasses of torch's
layers may compute something else (weight standardization, an activation after the norm), so only plain layers are
folded.
"""

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, fx, nn

from convolve.layers.batch_norm import BatchNorm2d
from convolve.layers.blocks import SamePadConv2d
from convolve.layers.hooks import has_hooks
from convolve.layers.native import (
    ConvPoolReLU,
    DepthwiseConv2d,
    NativeBatchNorm2d,
    SameDepthwiseConv2d,
    WinogradConv2d,
)

_CONVOLUTIONS = (nn.Conv2d, SamePadConv2d, ConvPoolReLU, WinogradConv2d, DepthwiseConv2d, SameDepthwiseConv2d)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class _Tracer(fx.Tracer):
    """Traces into modules that contain convolutions or norms."""

    def is_leaf_module(self, module: nn.Module, module_qualified_name: str) -> bool:
        inner = (child for child in module.modules() if child is not module)
        return not any(isinstance(child, (nn.Conv2d, nn.BatchNorm2d)) for child in inner)


class _Graph:
    """The calls of modules in a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        try:
            self.nodes = list(_Tracer().trace(model).nodes)
        except Exception:  # the forward pass may be any code
            self.nodes = []
        self._calls = Counter(node.target for node in self.nodes if node.op == "call_module")
        # Layers whose weights are also used directly, as in `functional.conv2d(x, self.conv.weight)`.
        used = _find_used(self.nodes)
        self._calls.update(str(node.target).rpartition(".")[0] for node in used if node.op == "get_attr")

    def module(self, node: fx.Node | None) -> nn.Module | None:
        """Return the module of a node, if it is called only there."""
        if node is None or node.op != "call_module" or self._calls[node.target] > 1:
            return None
        return self._model.get_submodule(str(node.target))

    def source(self, node: fx.Node) -> fx.Node | None:
        """Return the node that computes the input, if its output has no other user."""
        source = node.args[0] if node.args else None
        return source if isinstance(source, fx.Node) and len(source.users) == 1 else None

    def user(self, node: fx.Node) -> fx.Node | None:
        """Return the only node that uses the output."""
        return next(iter(node.users)) if len(node.users) == 1 else None


def _find_used(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that the output depends on; others only inspect a tensor, such as the shape of a weight."""
    used = set[fx.Node]()
    for node in reversed(nodes):
        if node.op == "output" or not used.isdisjoint(node.users):
            used.add(node)
    return used


def fold_batch_norms(model: ModuleT) -> ModuleT:
    """Return a copy for evaluation with batch norms folded into convolutions where possible."""
    copy = deepcopy(model).eval().requires_grad_(False)
    graph = _Graph(copy)
    for node in graph.nodes:
        norm = graph.module(node)
        if _is_plain_norm(norm) and norm.track_running_stats and _fold(norm, node, graph):
            parent, _, name = str(node.target).rpartition(".")
            setattr(copy.get_submodule(parent), name, nn.Identity())
    return copy


def count_batch_norms(model: nn.Module) -> int:
    """Count the batch norms of a model that could be folded."""
    return sum(map(_is_plain_norm, model.modules()))


def _is_plain_norm(module: nn.Module | None) -> TypeGuard[nn.BatchNorm2d]:
    return type(module) in (nn.BatchNorm2d, BatchNorm2d, NativeBatchNorm2d)


def _is_plain_conv(module: nn.Module | None) -> TypeGuard[nn.Conv2d]:
    return module is not None and type(module) in _CONVOLUTIONS and not has_hooks(module)


def _fold(norm: nn.BatchNorm2d, node: fx.Node, graph: _Graph) -> bool:
    """Fold a norm into a convolution. Returns False if none can take it."""
    scale, shift = _affine(norm)
    before = graph.source(node)
    if before is not None and isinstance(graph.module(before), nn.MaxPool2d) and bool((scale >= 0).all()):
        before = graph.source(before)
    earlier, later = graph.module(before), graph.module(graph.user(node))
    if _is_plain_conv(earlier):
        _set_bias(earlier, earlier.weight * scale[:, None, None, None], _bias(earlier) * scale + shift)
        return True
    if _is_plain_conv(later) and later.groups == 1 and later.padding in ((0, 0), "valid"):
        moved = torch.einsum("oihw,i->o", later.weight.double(), shift)
        _set_bias(later, later.weight * scale[None, :, None, None], _bias(later) + moved)
        return True
    return False


def _affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return the scale and shift of each channel."""
    assert norm.running_mean is not None and norm.running_var is not None, "statistics are tracked"
    mean, scale = norm.running_mean.double(), (norm.running_var.double() + norm.eps).rsqrt()
    if not norm.affine:
        return scale, -mean * scale
    scale = scale * norm.weight.double()
    return scale, norm.bias.double() - mean * scale


def _bias(conv: nn.Conv2d) -> Tensor:
    return conv.weight.new_zeros(conv.out_channels).double() if conv.bias is None else conv.bias.double()


def _set_bias(conv: nn.Conv2d, weight: Tensor, bias: Tensor) -> None:
    kind = conv.weight.dtype
    conv.weight = nn.Parameter(weight.to(kind), requires_grad=False)
    conv.bias = nn.Parameter(bias.to(kind), requires_grad=False)
