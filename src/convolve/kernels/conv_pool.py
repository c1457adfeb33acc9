"""Convolution, 2x2 max-pool and ReLU as one operation with gradients, in native code (`conv_pool.c`).

Small models spend most of a step in these three layers. One pass over them writes a quarter of the values, and the
backward pass uses only the gradients that pool and ReLU pass on. Values and gradients equal those of the three layers
except for the order of sums. They depend neither on the number of threads nor on the other images of the batch.
"""

import ctypes
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convolve.kernels import binding
from convolve.kernels.binding import INT, LONG, POINTER, Kernel, Signatures, addresses, dense
from convolve.kernels.build import Unavailable

# Copies between registers must not become calls of memcpy.
_OPTIONS = ("-fno-tree-loop-distribute-patterns",)
_Sizes = LONG * 11  # `shape` in the C file
_SIZES = ctypes.POINTER(_Sizes)

_SIGNATURES = Signatures(
    forward=(_SIZES, *[POINTER] * 6),
    backward=(_SIZES, *[POINTER] * 8),
    scratch=(_SIZES, INT),
)

MAX_CHANNELS = 4095  # the C file has 12-bit counters


class Geometry(NamedTuple):
    """Padding of the convolution, and ceil_mode of the pool."""

    padding: tuple[int, int] = (0, 0)
    ceil_mode: bool = False

    def pooled(self, image: torch.Size, kernel: torch.Size) -> tuple[int, int]:
        """Return the output height and width."""
        sides = zip(image[2:], kernel[2:], self.padding, strict=True)
        height, width = ((side + 2 * padding - size + 1 + self.ceil_mode) // 2 for side, size, padding in sides)
        return height, width


class ConvPoolLayout(NamedTuple):
    """Sizes for the C file, output size, threads and scratch memory for tensors of given shapes."""

    sizes: Any
    pooled: tuple[int, int]
    threads: int
    scratch_bytes: int

    def scratch(self) -> Tensor:
        """Allocate memory for either pass."""
        return torch.empty(self.scratch_bytes, dtype=torch.uint8)


def can_run(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> bool:
    """Check for plain float32 tensors in CPU memory whose shapes fit."""
    return (
        binding.are_plain(x, weight)
        and len(x) > 0
        and x.shape[1] == weight.shape[1]
        and len(weight) <= MAX_CHANNELS
        and (bias is None or binding.is_vector(bias, len(weight)))
        and min(geometry.pooled(x.shape, weight.shape)) > 0
    )


def conv_pool_relu(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return relu(max_pool2d(conv2d(x, weight, bias), 2)) of inputs that `can_run` accepts."""
    assert can_run(x, weight, bias, geometry), f"{tuple(x.shape)} and {tuple(weight.shape)}: not a case for native code"
    if bias is None:
        bias = weight.new_zeros(weight.shape[0])
    if not torch.is_grad_enabled():
        return _run_forward((dense(x), dense(weight), bias), geometry, training=False)[0]
    out: Tensor = _ConvPool.apply(x, weight, bias, geometry)  # type: ignore[no-untyped-call]
    return out


def _run_forward(inputs: tuple[Tensor, Tensor, Tensor], geometry: Geometry, *, training: bool) -> tuple[Tensor, Tensor]:
    """Return the output and, in training, the index of each window's maximum."""
    x, weight, bias = inputs
    kernel, layout = binding.require(load()), _layout(x.shape, weight.shape, geometry, torch.get_num_threads())
    y = torch.empty((len(x), len(weight), *layout.pooled), memory_format=torch.channels_last)
    argmax = torch.empty(y.numel() if training else 0, dtype=torch.int8)
    scratch = layout.scratch()
    pointers = addresses(x, weight, bias, y, argmax if training else None, scratch)
    kernel.forward(layout.sizes, *pointers, layout.threads, kernel.parallel)
    return y, argmax


class _ConvPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry) -> Tensor:
        x, weight = dense(x), dense(weight)
        y, argmax = _run_forward((x, weight, bias), geometry, training=True)
        ctx.save_for_backward(x, weight, argmax)
        ctx.geometry = geometry
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, argmax = ctx.saved_tensors
        kernel, layout = binding.require(load()), _layout(x.shape, weight.shape, ctx.geometry, torch.get_num_threads())
        g, scratch = dense(gradients[0]), layout.scratch()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw, db = torch.empty_like(weight), torch.empty(len(weight))
        pointers = addresses(x, weight, g, argmax, dx, dw, db, scratch)
        kernel.backward(layout.sizes, *pointers, layout.threads, kernel.parallel)
        return dx, dw, db, None


@cache
def load(*options: str) -> Kernel | Unavailable:
    """Load the kernel for this CPU, compiled with additional options."""
    return binding.load_kernel("conv_pool.c", _SIGNATURES, (*_OPTIONS, *options))


@lru_cache(maxsize=64)
def _layout(image: torch.Size, weight: torch.Size, geometry: Geometry, threads: int) -> ConvPoolLayout:
    count, channels, height, width = image
    outputs, _, *sides = weight
    pooled = geometry.pooled(image, weight)
    sizes = _Sizes(count, height, width, channels, outputs, *sides, *geometry.padding, *pooled)
    return ConvPoolLayout(sizes, pooled, threads, binding.require(load()).scratch(sizes, threads))
