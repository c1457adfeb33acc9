"""Depthwise convolution in native code (`depthwise.c`), with gradients.

Sums are taken in another order than in PyTorch, so results differ in the last bits: by about 1e-7 of the largest value,
or 1e-5 for the filters' gradients.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convolve.kernels import binding
from convolve.kernels.binding import INT, LONG, POINTER, Kernel, Signatures, addresses, are_plain, dense
from convolve.kernels.build import Unavailable

KERNEL_SIZES, STRIDES = (3, 5), (1, 2)
# Images, height, width, channels, kernel size, stride, output height and width, missing zeros: `shape` in C.
_Sizes = LONG * 10
_SIZES = ctypes.POINTER(_Sizes)
_SIGNATURES = Signatures(forward=(_SIZES, *[POINTER] * 4), backward=(_SIZES, *[POINTER] * 6), scratch=(_SIZES, INT))


@cache
def load(*options: str) -> Kernel | Unavailable:
    """Load the kernel for this CPU, compiled with additional options."""
    return binding.load_kernel("depthwise.c", _SIGNATURES, options)


def supports(channels: int, kernel_size: int, stride: int) -> bool:
    """Check that the kernel is available and takes such filters on this CPU."""
    kernel = load()
    fits = kernel_size in KERNEL_SIZES and stride in STRIDES
    return isinstance(kernel, Kernel) and fits and channels % kernel.constant("lanes") == 0


def can_run(x: Tensor, weight: Tensor) -> bool:
    """Check the input of a layer that `supports` accepts."""
    return are_plain(x, weight)


def convolve(x: Tensor, weight: Tensor, stride: int, before: tuple[int, int] | None = None) -> Tensor:
    """Convolve each channel with its filter, with padding that keeps the size at stride 1. Returns channels-last.

    `before` has the zeros above and on the left, if they are fewer than half the filter; possible with stride 2 only.
    """
    channels, size = weight.shape[0], weight.shape[-1]
    assert x.shape[1] == channels and supports(channels, size, stride), f"{tuple(weight.shape)}: not for native code"
    missing = tuple(size // 2 - zeros for zeros in before or (size // 2, size // 2))
    assert all(0 <= zeros < stride for zeros in missing), f"padding {before}: not for native code"
    out: Tensor = _Depthwise.apply(x, weight, stride, missing)  # type: ignore[no-untyped-call]
    return out


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, missing: tuple[int, int]) -> Tensor:
        kernel, x, sizes = binding.require(load()), dense(x), _sizes(x, weight, stride, missing)
        y = torch.empty((len(x), len(weight), *sizes[6:8]), memory_format=torch.channels_last)
        taps, threads = _by_tap(weight), torch.get_num_threads()
        scratch = torch.empty(kernel.scratch(sizes, threads), dtype=torch.uint8)
        kernel.forward(sizes, *addresses(x, taps, y, scratch), threads, kernel.parallel)
        ctx.save_for_backward(x, weight)
        ctx.settings = stride, missing
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if not len(x):  # the kernel sums over images, starting with the first
            return torch.zeros_like(x), torch.zeros_like(weight), None, None
        kernel, g, sizes = binding.require(load()), dense(gradients[0]), _sizes(x, weight, *ctx.settings)
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        taps = _by_tap(weight)
        dw, threads = torch.empty_like(taps), torch.get_num_threads()
        scratch = torch.empty(kernel.scratch(sizes, threads), dtype=torch.uint8)
        kernel.backward(sizes, *addresses(x, taps, g, dx, dw, scratch), threads, kernel.parallel)
        return dx, dw.T.reshape(weight.shape), None, None


def _sizes(x: Tensor, weight: Tensor, stride: int, missing: tuple[int, int]) -> Any:
    images, channels, height, width = x.shape
    outputs = ((side - 1) // stride + 1 for side in (height, width))
    return _Sizes(images, height, width, channels, weight.shape[-1], stride, *outputs, *missing)


def _by_tap(weight: Tensor) -> Tensor:
    """Return the filters as [tap][channel]."""
    return weight.detach().reshape(len(weight), -1).T.contiguous()
