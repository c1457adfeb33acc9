"""Batch norm in training, with the activation behind it, as one operation with gradients (`batch_norm.c`).

They are bound by memory: PyTorch's norm and ReLU walk over a tensor eleven times in both passes, this seven times.
"""

from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convolve.kernels import binding
from convolve.kernels.binding import DOUBLE, INT, LONG, POINTER, Kernel, Signatures, addresses, dense

_SIGNATURES = Signatures(
    forward=(LONG, LONG, INT, DOUBLE, *[POINTER] * 6),
    backward=(LONG, LONG, INT, *[POINTER] * 9),
    scratch=(LONG, LONG),
)

Activation = Literal["none", "relu", "silu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)  # the C file knows them by their number


def can_run(x: Tensor, weight: Tensor) -> bool:
    """Whether the operation exists for these: plain float32 images in CPU memory, and a kernel."""
    return binding.are_plain(x, weight) and x.shape[1] == len(weight) and x.numel() > len(weight) and load() is not None


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, activation: Activation = "none"
) -> tuple[Tensor, Tensor]:
    """The images, normalized by their own statistics and activated; and each channel's mean and unbiased variance."""
    assert can_run(x, weight), f"{tuple(x.shape)} and {tuple(weight.shape)}: not a case for native code"
    y, found = _BatchNorm.apply(x, weight, bias, eps, ACTIVATIONS.index(activation))  # type: ignore[no-untyped-call]
    return y, found[:2]


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, activation: int
    ) -> tuple[Tensor, Tensor]:
        kernel, x = binding.require(load()), dense(x)
        y, found = torch.empty_like(x), torch.empty(3, len(weight))
        rows, memory = _rows(x), _workspace(x)
        pointers = addresses(x, weight, bias, y, found, memory)
        kernel.forward(rows, len(weight), activation, eps, *pointers, torch.get_num_threads(), kernel.parallel)
        ctx.save_for_backward(x, weight, bias, found)
        ctx.activation = activation
        ctx.mark_non_differentiable(found)
        return y, found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, found = ctx.saved_tensors
        kernel, g, memory = binding.require(load()), dense(gradients[0]), _workspace(x)
        dx, dw, db = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
        pointers = addresses(x, g, weight, bias, found, dx, dw, db, memory)
        kernel.backward(_rows(x), len(weight), ctx.activation, *pointers, torch.get_num_threads(), kernel.parallel)
        return dx, dw, db, None, None


@cache
def load(*options: str) -> Kernel | None:
    """The kernel for this CPU, compiled with further options; None where it cannot be."""
    return binding.load_kernel("batch_norm.c", _SIGNATURES, options)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def _workspace(x: Tensor) -> Tensor:
    return torch.empty(binding.require(load()).scratch(_rows(x), x.shape[1]), dtype=torch.uint8)
