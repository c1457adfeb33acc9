"""Convolution, 2x2 max-pool and ReLU as one operation with gradients, in native code (`conv_pool.c`).

Small networks spend most of a step in these three. One pass over them leaves a quarter of the values to be written,
and the backward pass computes only with gradients that the pool and ReLU let through. Values and gradients are those of
the three layers but for the order of sums; they depend neither on the number of threads nor, for an image, on the
others in its batch.
"""

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from convolve import native

# Sums may be fused; and what is to stay in registers must not become a call of memcpy.
_OPTIONS = ("-ffp-contract=fast", "-fno-tree-loop-distribute-patterns")
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_FORWARD = (*[_POINTER] * 7, _INT, _POINTER)
_BACKWARD = (*[_POINTER] * 9, _INT, _POINTER)

MOST_CHANNELS = 4095  # the C file counts them in twelve bits


class Geometry(NamedTuple):
    """Zeros around the images, and whether the pool keeps an odd last row or column."""

    padding: tuple[int, int] = (0, 0)
    ceil_mode: bool = False

    def pooled(self, image: torch.Size, kernel: torch.Size) -> tuple[int, int]:
        """Height and width of the result."""
        sides = zip(image[2:], kernel[2:], self.padding, strict=True)
        height, width = ((side + 2 * zeros - reach + 1 + self.ceil_mode) // 2 for side, reach, zeros in sides)
        return height, width


class Kernel(NamedTuple):
    """The compiled passes, ready to be called."""

    forward: Callable[..., int]
    backward: Callable[..., int]
    scratch: Callable[..., int]
    parallel: int | None


class Plan(NamedTuple):
    """What a pass over tensors of some shapes needs: their sizes as `shape` in the C file has them, and memory."""

    shape: Any
    pooled: tuple[int, int]
    threads: int
    scratch_bytes: int

    def workspace(self) -> Tensor:
        """Memory for either pass; its contents do not matter."""
        return torch.empty(self.scratch_bytes, dtype=torch.uint8)


def can_run(x: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """Whether the operation exists for these: plain float32 tensors in CPU memory, whose shapes fit, and a kernel."""
    return (
        type(x) is Tensor
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.ndim == 4
        and len(x) > 0
        and x.shape[1] == weight.shape[1]
        and len(weight) <= MOST_CHANNELS
        and min(geometry.pooled(x.shape, weight.shape)) > 0
        and load() is not None
    )


def convolve_pool_rectify(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """relu(max_pool2d(conv2d(x, weight, bias), 2)); to be asked only what it can run."""
    assert can_run(x, weight, geometry), f"{tuple(x.shape)} and {tuple(weight.shape)}: not a case for native code"
    if bias is None:
        bias = weight.new_zeros(weight.shape[0])
    if not torch.is_grad_enabled():
        return _run_forward((_dense(x), _dense(weight), bias), geometry, learning=False)[0]
    out: Tensor = _ConvPool.apply(x, weight, bias, geometry)  # type: ignore[no-untyped-call]
    return out


def _run_forward(given: tuple[Tensor, Tensor, Tensor], geometry: Geometry, *, learning: bool) -> tuple[Tensor, Tensor]:
    """The result, and which pixels it came from if gradients will be asked for."""
    x, weight, bias = given
    kernel, plan = _loaded(), _plan(x.shape, weight.shape, geometry, torch.get_num_threads())
    y = torch.empty((len(x), len(weight), *plan.pooled), memory_format=torch.channels_last)
    where = torch.empty(y.numel() if learning else 0, dtype=torch.int8)
    memory = plan.workspace()
    pointers = (tensor.data_ptr() for tensor in (x, weight, bias, y))
    chosen = where.data_ptr() if learning else None
    kernel.forward(plan.shape, *pointers, chosen, memory.data_ptr(), plan.threads, kernel.parallel)
    return y, where


class _ConvPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry) -> Tensor:
        x, weight = _dense(x), _dense(weight)
        y, where = _run_forward((x, weight, bias), geometry, learning=True)
        ctx.save_for_backward(x, weight, where)
        ctx.geometry = geometry
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, where = ctx.saved_tensors
        kernel, plan = _loaded(), _plan(x.shape, weight.shape, ctx.geometry, torch.get_num_threads())
        g, memory = _dense(gradients[0]), plan.workspace()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw, db = torch.empty_like(weight), torch.empty(len(weight))
        given = (x.data_ptr(), weight.data_ptr(), g.data_ptr(), where.data_ptr())
        made = (None if dx is None else dx.data_ptr(), dw.data_ptr(), db.data_ptr(), memory.data_ptr())
        kernel.backward(plan.shape, *given, *made, plan.threads, kernel.parallel)
        return dx, dw, db, None


@cache
def load(*options: str) -> Kernel | None:
    """The kernel for this CPU, compiled with further options; None where it cannot be."""
    library = native.load("convolve.kernels", "conv_pool.c", (*_OPTIONS, *options))
    if isinstance(library, str):
        return None
    return Kernel(
        library.function("convolve_conv_pool_forward", _FORWARD),
        library.function("convolve_conv_pool_backward", _BACKWARD),
        library.function("convolve_conv_pool_scratch", (_POINTER, _INT)),
        native.torch_threads(),
    )


def _loaded() -> Kernel:
    kernel = load()
    assert kernel is not None, "asked for only where there is native code"
    return kernel


def _dense(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@lru_cache(maxsize=64)
def _plan(image: torch.Size, weight: torch.Size, geometry: Geometry, threads: int) -> Plan:
    count, channels, height, width = image
    outputs, _, *sides = weight
    pooled = geometry.pooled(image, weight)
    sizes = (count, height, width, channels, outputs, *sides, *geometry.padding, *pooled)
    shape = (ctypes.c_int64 * len(sizes))(*sizes)
    return Plan(shape, pooled, threads, 64 * _loaded().scratch(shape, threads))
