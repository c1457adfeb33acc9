"""Batch norm while training and its activation as one operation with gradients, in native code (`batch_norm.c`).

Both are bound by memory bandwidth: in both passes, PyTorch's norm and ReLU traverse a tensor eleven times, this seven,
or five with frozen statistics.
"""

from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convolve.kernels import binding
from convolve.kernels.binding import DOUBLE, INT, LONG, POINTER, Kernel, Signatures, addresses, dense
from convolve.kernels.build import Unavailable

_SIGNATURES = Signatures(
    forward=(LONG, LONG, INT, INT, DOUBLE, *[POINTER] * 6),
    backward=(LONG, LONG, INT, INT, *[POINTER] * 9),
    scratch=(LONG, LONG),
)

Activation = Literal["none", "relu", "silu", "relu6"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)  # numbered as in the C file


def can_run(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Check for plain float32 images in CPU memory, with more than one value per channel."""
    return (
        binding.are_plain(x, weight)
        and binding.is_vector(weight, x.shape[1])
        and binding.is_vector(bias, x.shape[1])
        and x.numel() > len(weight)
    )


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, activation: Activation = "none"
) -> tuple[Tensor, Tensor]:
    """Return the images, normalized by the batch's statistics and activated, and [mean, unbiased variance]."""
    assert can_run(x, weight, bias), f"{tuple(x.shape)} and {tuple(weight.shape)}: not a case for native code"
    y, stats = _BatchNorm.apply(x, weight, bias, None, eps, activation)  # type: ignore[no-untyped-call]
    return y, stats[:2]


def normalize_frozen(
    x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, eps: float, activation: Activation = "none"
) -> Tensor:
    """Return the images, normalized by fixed statistics [mean, variance] and activated."""
    assert can_run(x, weight, bias), f"{tuple(x.shape)} and {tuple(weight.shape)}: not a case for native code"
    assert statistics.shape == (2, len(weight)) and statistics.dtype == torch.float32, "one mean and variance each"
    y: Tensor = _BatchNorm.apply(x, weight, bias, statistics, eps, activation)[0]  # type: ignore[no-untyped-call]
    return y


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, frozen: Tensor | None, eps: float, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        kernel, x = binding.require(load()), dense(x)
        y, stats = torch.empty_like(x), torch.empty(3, len(weight))
        ctx.settings = (_rows(x), len(weight), ACTIVATIONS.index(activation), int(frozen is not None))
        if frozen is not None:
            stats[:2] = frozen
        scratch = _scratch(x)
        pointers = addresses(x, weight, bias, y, stats, scratch)
        kernel.forward(*ctx.settings, eps, *pointers, torch.get_num_threads(), kernel.parallel)
        ctx.save_for_backward(x, weight, bias, stats)
        ctx.mark_non_differentiable(stats)
        return y, stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, stats = ctx.saved_tensors
        kernel, g, scratch = binding.require(load()), dense(gradients[0]), _scratch(x)
        dx, dw, db = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
        pointers = addresses(x, g, weight, bias, stats, dx, dw, db, scratch)
        kernel.backward(*ctx.settings, *pointers, torch.get_num_threads(), kernel.parallel)
        return dx, dw, db, None, None, None


@cache
def load(*options: str) -> Kernel | Unavailable:
    """Load the kernel for this CPU, compiled with additional options."""
    return binding.load_kernel("batch_norm.c", _SIGNATURES, options)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def _scratch(x: Tensor) -> Tensor:
    return torch.empty(binding.require(load()).scratch(_rows(x), x.shape[1]), dtype=torch.uint8)
