"""3x3 convolution with a quarter of the multiplications (Winograd), in native code (`winograd.c`), with gradients.

Results differ from PyTorch's in the last bits: by about 1e-6 of the largest output, or 1e-5 for the filters' gradients.
"""

import ctypes
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from convolve.kernels import binding
from convolve.kernels.binding import LONG, POINTER, Kernel, Signatures, addresses, dense
from convolve.kernels.build import Unavailable

TILE_POINTS = 36
# PyTorch computes images of which the 4x4 tiles would use less.
MIN_USED_FRACTION = 0.6
_G = [[1 / 4, 0, 0], [-1 / 6, -1 / 6, -1 / 6], [-1 / 6, 1 / 6, -1 / 6]]
_G += [[1 / 24, 1 / 12, 1 / 6], [1 / 24, -1 / 12, 1 / 6], [0, 0, 1]]
_FILE = "winograd.c"
_Sizes = LONG * 5  # images, height, width, inputs, outputs: `shape` in the C file
_SIZES = ctypes.POINTER(_Sizes)
_PASS = (_SIZES, *[POINTER] * 4)
_SIGNATURES = Signatures(forward=_PASS, backward=_PASS, scratch=(_SIZES, binding.INT))


@cache
def load(*options: str) -> Kernel | Unavailable:
    """Load the kernel for this CPU, compiled with additional options."""
    return binding.load_kernel(_FILE, _SIGNATURES, options)


def supports(inputs: int, outputs: int) -> bool:
    """Check that the kernel is available and takes such filters on this CPU."""
    kernel = load()
    return isinstance(kernel, Kernel) and not any(channels % kernel.constant("lanes") for channels in (inputs, outputs))


def can_run(x: Tensor) -> bool:
    """Check for a float32 batch in CPU memory, of a size for which the kernel is faster."""
    height, width = x.shape[-2:]
    covered = 16 * -(-height // 4) * -(-width // 4)
    return x.dtype == torch.float32 and x.device.type == "cpu" and height * width >= MIN_USED_FRACTION * covered


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
        return _apply(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dy, (x, weight) = dense(grads[0]), ctx.saved_tensors
        needs_dx, needs_dw = ctx.needs_input_grad
        dx = _apply(dy, weight.flip(2, 3).transpose(0, 1)) if needs_dx else None
        return dx, _differentiate_filters(x, dy) if needs_dw else None


def _apply(x: Tensor, weight: Tensor) -> Tensor:
    kernel, threads = binding.require(load()), torch.get_num_threads()
    (images, inputs, height, width), outputs = x.shape, weight.shape[0]
    sizes = _Sizes(images, height, width, inputs, outputs)
    y = torch.empty((images, outputs, height, width), memory_format=torch.channels_last)
    u = _transform_filters(weight, kernel.constant("winograd_panel"))
    scratch = _reuse_scratch(kernel.scratch(sizes, threads))
    kernel.forward(sizes, *addresses(x, u, y, scratch), threads, kernel.parallel)
    return y


def _transform_filters(weight: Tensor, panel: int) -> Tensor:
    """Return G w G^T as [spot][panel of outputs][inputs][in the panel]."""
    outputs, inputs = weight.shape[:2]
    count = -(-outputs // panel)
    padded = functional.pad(weight, (0, 0, 0, 0, 0, 0, 0, count * panel - outputs))
    columns = padded.reshape(count, panel, inputs, 9).permute(3, 0, 2, 1).reshape(9, -1)
    return _filter_matrix() @ columns


def _differentiate_filters(x: Tensor, dy: Tensor) -> Tensor:
    """Return G^T d G for the sums d over all tiles, in channels-last."""
    kernel, threads = binding.require(load()), torch.get_num_threads()
    (images, inputs, height, width), outputs = x.shape, dy.shape[1]
    sizes = _Sizes(images, height, width, inputs, outputs)
    panel = kernel.constant("winograd_panel")
    count = -(-outputs // panel)
    d = torch.empty(TILE_POINTS, count * inputs * panel)
    scratch = _reuse_scratch(kernel.scratch(sizes, threads))
    kernel.backward(sizes, *addresses(x, dy, d, scratch), threads, kernel.parallel)
    columns = (_filter_matrix().T @ d).view(9, count, inputs, panel)
    rows = columns.permute(1, 3, 0, 2).reshape(-1, 3, 3, inputs)
    return rows[:outputs].permute(0, 3, 1, 2)


@cache
def _filter_matrix() -> Tensor:
    """Return the matrix that transforms the nine values of a filter to those at the 36 spots."""
    g = torch.tensor(_G, dtype=torch.float64)
    return torch.kron(g, g).float()


_local = threading.local()


def _reuse_scratch(size: int) -> Tensor:
    """Return bytes kept per thread, since fresh pages cost as much as the computation. They start as zeros."""
    scratch: Tensor = getattr(_local, "scratch", torch.empty(0))
    if scratch.numel() < size:
        scratch = _local.scratch = torch.zeros(size, dtype=torch.uint8)
    return scratch
