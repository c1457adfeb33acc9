"""3x3 convolutions with a quarter of the multiplications: `winograd.c`, with gradients.

Results differ from PyTorch's in the last bits (about 1e-6 of the largest output, 1e-5 for the filters' gradients), as
the sums are others. Where there is no native code, there is no such convolution: callers use PyTorch's.
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

TILE_POINTS = 36
# Images whose tiles would reach far over their edges are left to PyTorch.
MIN_USED_FRACTION = 0.6
_G = [[1 / 4, 0, 0], [-1 / 6, -1 / 6, -1 / 6], [-1 / 6, 1 / 6, -1 / 6]]
_G += [[1 / 24, 1 / 12, 1 / 6], [1 / 24, -1 / 12, 1 / 6], [0, 0, 1]]
_FILE = "winograd.c"
_Sizes = LONG * 5  # images, height, width, inputs, outputs: `shape` in the C file
_SIZES = ctypes.POINTER(_Sizes)
_PASS = (_SIZES, *[POINTER] * 4)
_SIGNATURES = Signatures(forward=_PASS, backward=_PASS, scratch=(_SIZES, binding.INT))


@cache
def load(*options: str) -> Kernel | None:
    """The kernel for this CPU, compiled with further options; None where it cannot be."""
    return binding.load_kernel(_FILE, _SIGNATURES, options)


def suits_channels(inputs: int, outputs: int) -> bool:
    """Whether this machine's native code takes such filters."""
    kernel = load()
    return kernel is not None and not any(channels % kernel.constant("lanes") for channels in (inputs, outputs))


def suits_image(x: Tensor) -> bool:
    """Whether a batch is of the kind and the size for which this pays."""
    height, width = x.shape[-2:]
    covered = 16 * -(-height // 4) * -(-width // 4)
    return x.dtype == torch.float32 and x.device.type == "cpu" and height * width >= MIN_USED_FRACTION * covered


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """The 3x3 convolution of stride 1 and padding 1, for what suits; the output is in channels-last."""
    outputs, inputs = weight.shape[:2]
    assert x.shape[1] == inputs and suits_channels(inputs, outputs), (
        f"{inputs} to {outputs} channels: not for native code"
    )
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
        wants_x, wants_weight = ctx.needs_input_grad
        dx = _apply(dy, weight.flip(2, 3).transpose(0, 1)) if wants_x else None
        return dx, _differentiate_filters(x, dy) if wants_weight else None


def _apply(x: Tensor, weight: Tensor) -> Tensor:
    kernel, threads = binding.require(load()), torch.get_num_threads()
    (images, inputs, height, width), outputs = x.shape, weight.shape[0]
    sizes = _Sizes(images, height, width, inputs, outputs)
    y = torch.empty((images, outputs, height, width), memory_format=torch.channels_last)
    u = _transform_filters(weight, kernel.constant("winograd_panel"))
    scratch = _find_scratch(kernel.scratch(sizes, threads))
    kernel.forward(sizes, *addresses(x, u, y, scratch), threads, kernel.parallel)
    return y


def _transform_filters(weight: Tensor, panel: int) -> Tensor:
    """G w G^T as [spot][panel of outputs][inputs][in the panel]."""
    outputs, inputs = weight.shape[:2]
    count = -(-outputs // panel)
    padded = functional.pad(weight, (0, 0, 0, 0, 0, 0, 0, count * panel - outputs))
    columns = padded.reshape(count, panel, inputs, 9).permute(3, 0, 2, 1).reshape(9, -1)
    return _filter_matrix() @ columns


def _differentiate_filters(x: Tensor, dy: Tensor) -> Tensor:
    """G^T d G for the sums d over all tiles; in channels-last, as filters are kept."""
    kernel, threads = binding.require(load()), torch.get_num_threads()
    (images, inputs, height, width), outputs = x.shape, dy.shape[1]
    sizes = _Sizes(images, height, width, inputs, outputs)
    panel = kernel.constant("winograd_panel")
    count = -(-outputs // panel)
    d = torch.empty(TILE_POINTS, count * inputs * panel)
    scratch = _find_scratch(kernel.scratch(sizes, threads))
    kernel.backward(sizes, *addresses(x, dy, d, scratch), threads, kernel.parallel)
    columns = (_filter_matrix().T @ d).view(9, count, inputs, panel)
    rows = columns.permute(1, 3, 0, 2).reshape(-1, 3, 3, inputs)
    return rows[:outputs].permute(0, 3, 1, 2)


@cache
def _filter_matrix() -> Tensor:
    """What turns the nine numbers of a filter into those at the 36 spots."""
    g = torch.tensor(_G, dtype=torch.float64)
    return torch.kron(g, g).float()


_local = threading.local()


def _find_scratch(size: int) -> Tensor:
    """Bytes that the next call of this thread uses again, as fresh pages cost as much as the work; zeros at first."""
    found: Tensor = getattr(_local, "scratch", torch.empty(0))
    if found.numel() < size:
        found = _local.scratch = torch.zeros(size, dtype=torch.uint8)
    return found
