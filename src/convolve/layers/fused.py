"""Convolutions that compute the activation after them in the same pass over memory, for inference on a CPU.

Folding batch norms leaves a convolution, its bias and ReLU or ReLU6. oneDNN computes all three in one call. The result
is that of the separate layers up to the last bits. Weights are copied in the layout that oneDNN prefers.
"""

from collections.abc import Sequence
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from convolve.layers.blocks import SamePadConv2d, same_padding
from convolve.layers.native import DepthwiseConv2d, SameDepthwiseConv2d, WinogradConv2d

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_ATTRIBUTES = {nn.ReLU: ("relu", []), nn.ReLU6: ("hardtanh", [0.0, 6.0]), type(None): ("none", [])}
_PLAIN = (nn.Conv2d, SamePadConv2d, DepthwiseConv2d, SameDepthwiseConv2d, WinogradConv2d)


class FusedConv2d(nn.Module):
    """A convolution with bias and an activation, without gradients."""

    def __init__(self, conv: nn.Conv2d, activation: nn.Module | None) -> None:
        super().__init__()
        self._conv = conv
        self._name, self._limits = _ATTRIBUTES[type(activation)]
        self._packed: dict[tuple[int, ...], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        conv = self._conv
        x, padding = _pad(conv, x)
        settings = (padding, list(conv.stride), list(conv.dilation), conv.groups)
        shape = tuple(x.shape)
        if shape not in self._packed:
            # The best layout depends on the input size.
            self._packed = {shape: torch.ops.mkldnn._reorder_convolution_weight(conv.weight, *settings, list(shape))}
        out: Tensor = torch.ops.mkldnn._convolution_pointwise(
            x, self._packed[shape], conv.bias, *settings, self._name, self._limits, ""
        )
        return out


def _pad(conv: nn.Conv2d, x: Tensor) -> tuple[Tensor, list[int]]:
    """Return the input and the symmetric padding that is left to do."""
    if not isinstance(conv, SamePadConv2d):
        assert isinstance(conv.padding, tuple), "matched"
        return x, list(conv.padding)
    sides = zip(x.shape[2:], conv.kernel_size, conv.stride, strict=True)
    (top, bottom), (left, right) = (same_padding(*side) for side in sides)
    if (top, left) == (bottom, right):
        return x, [top, left]
    return functional.pad(x, (left, right, top, bottom)), [0, 0]


def fuse_activations(model: ModuleT) -> ModuleT:
    """Replace convolutions in the sequences of a folded model, with the activation after them. Changes the model.

    A model on another device or in another format stays as it is.
    """
    tensors = [*model.parameters(), *model.buffers()]
    plain = all(t.device.type == "cpu" and t.dtype in (torch.float32, torch.int64) for t in tensors)
    if not (plain and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]
        return model
    for sequence in [module for module in model.modules() if isinstance(module, nn.Sequential)]:
        _fuse_sequence(sequence)
    return model


def _fuse_sequence(sequence: nn.Sequential) -> None:
    children = list(sequence.named_children())
    for position, (name, conv) in enumerate(children):
        if not _is_fusible(conv):
            continue
        following = _activation_after(children[position + 1 :])
        activation = None if following is None else sequence.get_submodule(following)
        sequence.set_submodule(name, FusedConv2d(conv, activation))
        if following is not None:
            sequence.set_submodule(following, nn.Identity())


def _is_fusible(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    return (
        isinstance(module, nn.Conv2d)
        and type(module) in _PLAIN
        and not isinstance(module.padding, str)
        and module.padding_mode == "zeros"
    )


def _activation_after(children: Sequence[tuple[str, nn.Module]]) -> str | None:
    """Return the name of the activation that follows, behind folded norms."""
    for name, module in children:
        if type(module) in (nn.ReLU, nn.ReLU6):
            return name
        if not isinstance(module, nn.Identity):
            return None
    return None
