"""3x3 convolution with a quarter of the multiplications (Winograd), in native code (`winograd.c`), with gradients.

Results differ from PyTorch's in the last bits: by about 1e-6 of the largest output, or 1e-5 for the filters' gradients.
"""

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from convolve.kernels import binding
from convolve.kernels.binding import LONG, POINTER, Kernel, Signatures, addresses, dense
from convolve.kernels.build import Unavailable

# PyTorch computes images of which the 4x4 tiles would use less.
MIN_USED_FRACTION = 0.6
_FILE = "winograd.c"
_Shape = LONG * 9  # images, height, width, inputs, outputs, strides of the filters: `shape` in the C file
_SHAPE = ctypes.POINTER(_Shape)
_PASS = (_SHAPE, *[POINTER] * 4)
_SIGNATURES = Signatures(forward=_PASS, backward=_PASS, scratch=(_SHAPE, binding.INT))


@cache
def load(*options: str) -> Kernel | Unavailable:
    """Load the kernel for this CPU, compiled with additional options."""
    return binding.load_kernel(_FILE, _SIGNATURES, options)


def supports(inputs: int, outputs: int) -> bool:
    """Check that the kernel is available and takes such filters on this CPU."""
    kernel = load()
    if not isinstance(kernel, Kernel):
        return False
    lanes, half = kernel.constant("lanes"), kernel.constant("winograd_half")
    return all(channels >= lanes and channels % half == 0 for channels in (inputs, outputs))


def can_run(x: Tensor, weight: Tensor) -> bool:
    """Check for a float32 batch in CPU memory, of a size for which the kernel is faster."""
    if not binding.are_plain(x, weight):
        return False
    height, width = x.shape[-2:]
    covered = 16 * -(-height // 4) * -(-width // 4)
    return height * width >= MIN_USED_FRACTION * covered


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve by 3x3 filters with stride 1 and padding 1. Returns channels-last."""
    outputs, inputs = weight.shape[:2]
    assert x.shape[1] == inputs and supports(inputs, outputs), f"{inputs} to {outputs} channels: not for native code"
    out: Tensor = _Convolution.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x = dense(x)
        ctx.save_for_backward(x, weight)
        return _apply(x, weight, weight.stride(), weight.data_ptr())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dy, (x, weight) = dense(grads[0]), ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad
        dx = _apply_transposed(dy, weight) if needs_dx else None
        return dx, _differentiate_filters(x, dy, weight) if needs_dw else None


def _apply_transposed(dy: Tensor, weight: Tensor) -> Tensor:
    """Convolve with the filters rotated by 180 degrees, inputs and outputs exchanged."""
    to_output, to_input, to_row, to_column = weight.stride()
    last = weight.data_ptr() + 2 * (to_row + to_column) * weight.element_size()
    return _apply(dy, weight.transpose(0, 1), (to_input, to_output, -to_row, -to_column), last)


def _apply(x: Tensor, weight: Tensor, strides: Sequence[int], first: int) -> Tensor:
    """Convolve with filters of the shape of `weight`, the first of them at an address."""
    kernel, threads = binding.require(load()), torch.get_num_threads()
    (images, inputs, height, width), outputs = x.shape, len(weight)
    shape = _Shape(images, height, width, inputs, outputs, *strides)
    y = torch.empty((images, outputs, height, width), memory_format=torch.channels_last)
    scratch = _reuse_scratch(kernel.scratch(shape, threads))
    kernel.forward(shape, x.data_ptr(), first, *addresses(y, scratch), threads, kernel.parallel)
    return y


def _differentiate_filters(x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    kernel, threads = binding.require(load()), torch.get_num_threads()
    (images, inputs, height, width), outputs = x.shape, dy.shape[1]
    dw = torch.empty_like(weight)
    shape = _Shape(images, height, width, inputs, outputs, *dw.stride())
    scratch = _reuse_scratch(kernel.scratch(shape, threads))
    kernel.backward(shape, *addresses(x, dy, dw, scratch), threads, kernel.parallel)
    return dw


_local = threading.local()


def _reuse_scratch(size: int) -> Tensor:
    """Return bytes kept per thread, since fresh pages cost as much as the computation. They start as zeros."""
    scratch: Tensor = getattr(_local, "scratch", torch.empty(0))
    if scratch.numel() < size:
        scratch = _local.scratch = torch.zeros(size, dtype=torch.uint8)
    return scratch
