"""Convolutions and matrix products with a 16-bit accumulator in native code (`half_partials.c`), with gradients.

The functions take operands in any layout. Unlike the kernels of layers they replace operations, below autograd, and
compute the same bits as `numerics/half_accumulation.py`, which is used if they are unavailable.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from convolve.kernels import binding
from convolve.kernels.binding import INT, LONG, POINTER, Kernel, Signatures, addresses, dense
from convolve.kernels.build import Unavailable
from convolve.rng import hash_counters

CHUNK = 16
_Sizes = LONG * 16  # `shape` in C
_SIZES = ctypes.POINTER(_Sizes)
_SIGNATURES = Signatures(
    forward=(_SIZES, *[POINTER] * 4, INT, POINTER),
    backward=(_SIZES, *[POINTER] * 7, INT, POINTER),
    scratch=(_SIZES, INT),
)


class Accumulator(NamedTuple):
    """Format of the accumulator: fp16 or bf16, infinite or clamped beyond its range."""

    bf16: bool
    clamped: bool


class Window(NamedTuple):
    """Settings of a convolution, each for height and width."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def output_size(self, x: Tensor, weight: Tensor) -> tuple[int, int]:
        """Return height and width of the output."""
        height, width = (
            (x.shape[2 + d] + 2 * self.padding[d] - self.dilation[d] * (weight.shape[2 + d] - 1) - 1) // self.stride[d]
            + 1
            for d in (0, 1)
        )
        return height, width


@cache
def load(bf16: bool, *options: str) -> Kernel | Unavailable:
    """Load the kernel of a format for this CPU, compiled with additional options."""
    # Fused operations change the products of bf16 that leave the range of fp32, but none of fp16.
    fixed = ("-DBF16", "-ffp-contract=off") if bf16 else ()
    return binding.load_kernel("half_partials.c", _SIGNATURES, (*fixed, *options))


def can_run(accumulator: Accumulator, *operands: Tensor) -> bool:
    """Check that the kernel is available and takes these operands: plain float32 in CPU memory, 4-dimensional."""
    plain = all(
        type(x) in (Tensor, Parameter) and x.dtype == torch.float32 and x.device.type == "cpu" and x.ndim == 4
        for x in operands
    )
    return plain and isinstance(load(accumulator.bf16), Kernel)


def convolve(x: Tensor, weight: Tensor, window: Window, accumulator: Accumulator, key: int | None) -> Tensor:
    """Return the convolution, channels-last. `key` makes rounding stochastic."""
    kernel, threads, sizes = binding.require(load(accumulator.bf16)), torch.get_num_threads(), _sizes(x, weight, window)
    x, weight = dense(x), dense(weight)
    y = torch.empty((len(x), len(weight), *window.output_size(x, weight)), memory_format=torch.channels_last)
    scratch = torch.empty(kernel.scratch(sizes, threads), dtype=torch.uint8)
    keys = _chunk_keys(weight[0].numel(), key)
    pointers = addresses(x, weight, y, keys)
    kernel.forward(sizes, *pointers, accumulator.clamped, scratch.data_ptr(), threads, kernel.parallel)
    return y


class GradientKeys(NamedTuple):
    """Keys for stochastic rounding of the two gradients; None rounds to nearest."""

    input: int | None
    weight: int | None


def differentiate(
    grad: Tensor,
    operands: tuple[Tensor, Tensor],
    window: Window,
    accumulator: Accumulator,
    keys: GradientKeys,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input and weight, channels-last, that are `wanted`."""
    kernel, threads, sizes = binding.require(load(accumulator.bf16)), torch.get_num_threads(), _sizes(*operands, window)
    g, x, weight = (dense(operand) for operand in (grad, *operands))
    dx, dw = (torch.empty_like(like) if needed else None for like, needed in zip((x, weight), wanted, strict=True))
    scratch = torch.empty(kernel.scratch(sizes, threads), dtype=torch.uint8)
    dx_keys = _chunk_keys(weight.shape[0] // window.groups * weight[0, 0].numel(), keys.input)
    dw_keys = _chunk_keys(g.numel() // max(1, g.shape[1]), keys.weight)
    pointers = addresses(x, weight, g, dx, dw, dx_keys, dw_keys)
    kernel.backward(sizes, *pointers, accumulator.clamped, scratch.data_ptr(), threads, kernel.parallel)
    return dx, dw


def _sizes(x: Tensor, weight: Tensor, window: Window) -> Any:
    images, channels, height, width = x.shape
    outputs = (*window.output_size(x, weight), len(weight))
    settings = (*window.stride, *window.padding, *window.dilation, window.groups)
    return _Sizes(images, height, width, channels, *outputs, *weight.shape[2:], *settings)


def _chunk_keys(products: int, key: int | None) -> Tensor | None:
    """Return the key of each chunk, `hash_key(key, number)`, as 64 bits."""
    if key is None:
        return None
    return torch.from_numpy(hash_counters(np.arange(-(-products // CHUNK)), key).view(np.int64))
