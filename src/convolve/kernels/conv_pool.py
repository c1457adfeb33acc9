"""Convolution, 2x2 max-pool and ReLU as one operation with gradients, in native code (`conv_pool.c`).

Small networks spend most of a step in these three. One pass over them leaves a quarter of the values to be written,
and the backward pass computes only with gradients that the pool and ReLU let through. Values and gradients are those of
the three layers but for the order of sums; they depend neither on the number of threads nor, for an image, on the
others in its batch.
"""

import ctypes
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convolve.kernels import binding
from convolve.kernels.binding import INT, LONG, POINTER, Kernel, Signatures, addresses, dense

# What is to stay in registers must not become a call of memcpy.
_OPTIONS = ("-fno-tree-loop-distribute-patterns",)
_Sizes = LONG * 11  # `shape` in the C file
_SIZES = ctypes.POINTER(_Sizes)

_SIGNATURES = Signatures(
    forward=(_SIZES, *[POINTER] * 6),
    backward=(_SIZES, *[POINTER] * 8),
    scratch=(_SIZES, INT),
)

MAX_CHANNELS = 4095  # the C file counts them in twelve bits


class Geometry(NamedTuple):
    """Zeros around the images, and whether the pool keeps an odd last row or column."""

    padding: tuple[int, int] = (0, 0)
    ceil_mode: bool = False

    def pooled(self, image: torch.Size, kernel: torch.Size) -> tuple[int, int]:
        """Height and width of the result."""
        sides = zip(image[2:], kernel[2:], self.padding, strict=True)
        height, width = ((side + 2 * zeros - reach + 1 + self.ceil_mode) // 2 for side, reach, zeros in sides)
        return height, width


class ConvPoolLayout(NamedTuple):
    """What a pass over tensors of some shapes needs: their sizes for the C file, and memory."""

    sizes: Any
    pooled: tuple[int, int]
    threads: int
    scratch_bytes: int

    def workspace(self) -> Tensor:
        """Memory for either pass; its contents do not matter."""
        return torch.empty(self.scratch_bytes, dtype=torch.uint8)


def can_run(x: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """Whether the operation exists for these: plain float32 tensors in CPU memory, whose shapes fit, and a kernel."""
    return (
        binding.are_plain(x, weight)
        and len(x) > 0
        and x.shape[1] == weight.shape[1]
        and len(weight) <= MAX_CHANNELS
        and min(geometry.pooled(x.shape, weight.shape)) > 0
        and load() is not None
    )


def conv_pool_relu(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """relu(max_pool2d(conv2d(x, weight, bias), 2)); to be asked only what it can run."""
    assert can_run(x, weight, geometry), f"{tuple(x.shape)} and {tuple(weight.shape)}: not a case for native code"
    if bias is None:
        bias = weight.new_zeros(weight.shape[0])
    if not torch.is_grad_enabled():
        return _run_forward((dense(x), dense(weight), bias), geometry, learning=False)[0]
    out: Tensor = _ConvPool.apply(x, weight, bias, geometry)  # type: ignore[no-untyped-call]
    return out


def _run_forward(given: tuple[Tensor, Tensor, Tensor], geometry: Geometry, *, learning: bool) -> tuple[Tensor, Tensor]:
    """The result, and which pixels it came from if gradients will be asked for."""
    x, weight, bias = given
    kernel, plan = binding.require(load()), _plan(x.shape, weight.shape, geometry, torch.get_num_threads())
    y = torch.empty((len(x), len(weight), *plan.pooled), memory_format=torch.channels_last)
    where = torch.empty(y.numel() if learning else 0, dtype=torch.int8)
    memory = plan.workspace()
    pointers = addresses(x, weight, bias, y, where if learning else None, memory)
    kernel.forward(plan.sizes, *pointers, plan.threads, kernel.parallel)
    return y, where


class _ConvPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry) -> Tensor:
        x, weight = dense(x), dense(weight)
        y, where = _run_forward((x, weight, bias), geometry, learning=True)
        ctx.save_for_backward(x, weight, where)
        ctx.geometry = geometry
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, where = ctx.saved_tensors
        kernel, plan = binding.require(load()), _plan(x.shape, weight.shape, ctx.geometry, torch.get_num_threads())
        g, memory = dense(gradients[0]), plan.workspace()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw, db = torch.empty_like(weight), torch.empty(len(weight))
        pointers = addresses(x, weight, g, where, dx, dw, db, memory)
        kernel.backward(plan.sizes, *pointers, plan.threads, kernel.parallel)
        return dx, dw, db, None


@cache
def load(*options: str) -> Kernel | None:
    """The kernel for this CPU, compiled with further options; None where it cannot be."""
    return binding.load_kernel("conv_pool.c", _SIGNATURES, (*_OPTIONS, *options))


@lru_cache(maxsize=64)
def _plan(image: torch.Size, weight: torch.Size, geometry: Geometry, threads: int) -> ConvPoolLayout:
    count, channels, height, width = image
    outputs, _, *sides = weight
    pooled = geometry.pooled(image, weight)
    sizes = _Sizes(count, height, width, channels, outputs, *sides, *geometry.padding, *pooled)
    return ConvPoolLayout(sizes, pooled, threads, binding.require(load()).scratch(sizes, threads))
