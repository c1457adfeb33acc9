"""Batch norm in training as one operation with gradients, with ReLU in the same passes if asked for (`batch_norm.c`).

Both are bound by memory: PyTorch's pair walks over a tensor eleven times forward and backward, this one seven times.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convolve import native

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_FORWARD = (_LONG, _LONG, _INT, ctypes.c_double, *[_POINTER] * 6, _INT, _POINTER)
_BACKWARD = (_LONG, _LONG, _INT, *[_POINTER] * 9, _INT, _POINTER)


class Kernel(NamedTuple):
    """The compiled passes, ready to be called."""

    forward: Callable[..., int]
    backward: Callable[..., int]
    scratch: Callable[..., int]
    parallel: int | None


def can_run(x: Tensor, weight: Tensor) -> bool:
    """Whether the operation exists for these: plain float32 images in CPU memory, and a kernel."""
    return (
        type(x) is Tensor
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.ndim == 4
        and x.shape[1] == len(weight)
        and x.numel() > len(weight)
        and load() is not None
    )


def normalise(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, relu: bool = False) -> tuple[Tensor, Tensor]:
    """The images, normalised by their own statistics; and the mean and unbiased variance of each channel [2, C]."""
    assert can_run(x, weight), f"{tuple(x.shape)} and {tuple(weight.shape)}: not a case for native code"
    y, found = _BatchNorm.apply(x, weight, bias, eps, relu)  # type: ignore[no-untyped-call]
    return y, found[:2]


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, relu: bool) -> tuple[Tensor, Tensor]:
        kernel, x = _loaded(), _dense(x)
        y, found = torch.empty_like(x), torch.empty(3, len(weight))
        rows, memory = _rows(x), _workspace(x)
        pointers = [tensor.data_ptr() for tensor in (x, weight, bias, y, found, memory)]
        kernel.forward(rows, len(weight), relu, eps, *pointers, torch.get_num_threads(), kernel.parallel)
        ctx.save_for_backward(x, weight, bias, found)
        ctx.relu = relu
        ctx.mark_non_differentiable(found)
        return y, found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, found = ctx.saved_tensors
        kernel, g, memory = _loaded(), _dense(gradients[0]), _workspace(x)
        dx, dw, db = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
        pointers = [tensor.data_ptr() for tensor in (x, g, weight, bias, found, dx, dw, db, memory)]
        kernel.backward(_rows(x), len(weight), ctx.relu, *pointers, torch.get_num_threads(), kernel.parallel)
        return dx, dw, db, None, None


@cache
def load(*options: str) -> Kernel | None:
    """The kernel for this CPU, compiled with further options; None where it cannot be."""
    library = native.load("convolve.kernels", "batch_norm.c", ("-ffp-contract=fast", *options))
    if isinstance(library, str):
        return None
    return Kernel(
        library.function("convolve_batch_norm_forward", _FORWARD),
        library.function("convolve_batch_norm_backward", _BACKWARD),
        library.function("convolve_batch_norm_scratch", (_LONG, _LONG)),
        native.torch_threads(),
    )


def _loaded() -> Kernel:
    kernel = load()
    assert kernel is not None, "asked for only where there is native code"
    return kernel


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def _workspace(x: Tensor) -> Tensor:
    return torch.empty(_loaded().scratch(_rows(x), x.shape[1]), dtype=torch.uint8)
