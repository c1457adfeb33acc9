"""3x3 convolutions with a quarter of the multiplications: `winograd.c`, with gradients.

Results differ from PyTorch's in the last bits (about 1e-6 of the largest output, 1e-5 for the filters' gradients), as
the sums are others. Where there is no native code, there is no such convolution: callers use PyTorch's.
"""

import ctypes
import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from convolve import native

SPOTS = 36
# Tiles that are computed together, so many that they just fit into the second cache.
BLOCK = 63
# Images whose tiles would reach far over their edges are left to PyTorch.
LEAST_USED = 0.6

_G = [[1 / 4, 0, 0], [-1 / 6, -1 / 6, -1 / 6], [-1 / 6, 1 / 6, -1 / 6]]
_G += [[1 / 24, 1 / 12, 1 / 6], [1 / 24, -1 / 12, 1 / 6], [0, 0, 1]]


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("images", "height", "width", "inputs", "outputs", "block")]


@dataclass(frozen=True)
class _Code:
    """The compiled file, and how it was compiled."""

    library: native.Library
    lanes: int

    @property
    def panel(self) -> int:
        return 2 * self.lanes

    def panels(self, channels: int) -> int:
        return -(-channels // self.panel)

    def room(self, inputs: int, outputs: int) -> int:
        """Floats that a block of transformed tiles of both sides takes, and a pixel of each side."""
        return (SPOTS + 1) * (self.panels(inputs) + self.panels(outputs)) * BLOCK * self.panel + inputs + outputs

    def call(self, name: str, shape: _Shape, tensors: list[Tensor], *sizes: int) -> None:
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        numbers = [ctypes.c_int64(size) for size in sizes]
        parallel = ctypes.c_void_p(native.torch_threads())
        getattr(self.library.loaded, name)(ctypes.byref(shape), *pointers, *numbers, torch.get_num_threads(), parallel)


@cache
def _load() -> _Code | str:
    library = native.load("convolve.kernels", "winograd.c", ("-ffp-contract=fast",))
    if isinstance(library, str):
        return library
    return _Code(library, library.function("convolve_winograd_lanes", ())())


def describe() -> str | None:
    """Why there are no such convolutions here; None where there are."""
    code = _load()
    return code if isinstance(code, str) else None


def suits_channels(inputs: int, outputs: int) -> bool:
    """Whether this machine's native code takes such filters."""
    code = _load()
    return not isinstance(code, str) and inputs % code.lanes == 0 and outputs % code.lanes == 0


def suits_image(x: Tensor) -> bool:
    """Whether a batch is of the kind and the size for which this pays."""
    height, width = x.shape[-2:]
    covered = 16 * -(-height // 4) * -(-width // 4)
    return x.dtype == torch.float32 and x.device.type == "cpu" and height * width >= LEAST_USED * covered


def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """The 3x3 convolution of stride 1 and padding 1, for what suits; the output is in channels-last."""
    out: Tensor = _Convolution.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        return _apply(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dy, (x, weight) = grads[0].contiguous(memory_format=torch.channels_last), ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad
        dx = _apply(dy, weight.flip(2, 3).transpose(0, 1)) if wants_x else None
        return dx, _differentiate_filters(x, dy) if wants_weight else None


def _apply(x: Tensor, weight: Tensor) -> Tensor:
    code = _require()
    (images, inputs, height, width), outputs = x.shape, weight.shape[0]
    y = torch.empty((images, outputs, height, width), memory_format=torch.channels_last)
    shape = _Shape(images, height, width, inputs, outputs, BLOCK)
    room = code.room(inputs, outputs)
    scratch = _find_scratch(room * torch.get_num_threads())
    code.call("convolve_winograd_forward", shape, [x, _transform_filters(weight, code), y, scratch], room)
    return y


def _transform_filters(weight: Tensor, code: _Code) -> Tensor:
    """G w G^T as [spot][panel of outputs][inputs][in the panel]."""
    outputs, inputs = weight.shape[:2]
    count = code.panels(outputs)
    padded = functional.pad(weight, (0, 0, 0, 0, 0, 0, 0, count * code.panel - outputs))
    columns = padded.reshape(count, code.panel, inputs, 9).permute(3, 0, 2, 1).reshape(9, -1)
    return _filter_matrix() @ columns


def _differentiate_filters(x: Tensor, dy: Tensor) -> Tensor:
    """G^T d G for the sums d over all tiles; in channels-last, as filters are kept."""
    code = _require()
    (images, inputs, height, width), outputs = x.shape, dy.shape[1]
    count = code.panels(outputs)
    d = torch.empty(SPOTS, count * inputs * code.panel)
    shape = _Shape(images, height, width, inputs, outputs, BLOCK)
    scratch = _find_scratch(code.room(inputs, outputs))
    code.call("convolve_winograd_filters", shape, [x, dy, d, scratch])
    columns = (_filter_matrix().T @ d).view(9, count, inputs, code.panel)
    rows = columns.permute(1, 3, 0, 2).reshape(-1, 3, 3, inputs)
    return rows[:outputs].permute(0, 3, 1, 2)


@cache
def _filter_matrix() -> Tensor:
    """What turns the nine numbers of a filter into those at the 36 spots."""
    g = torch.tensor(_G, dtype=torch.float64)
    return torch.kron(g, g).float()


_local = threading.local()


def _find_scratch(floats: int) -> Tensor:
    """Memory that the next call of this thread uses again, since fresh pages cost as much as the work."""
    found: Tensor = getattr(_local, "scratch", torch.empty(0))
    if found.numel() < floats:
        # Zeros, because unused columns of a panel are multiplied as well, and what happens to be there may be slow.
        found = _local.scratch = torch.zeros(floats)
    return found


def _require() -> _Code:
    code = _load()
    assert not isinstance(code, str), f"winograd.c is not there: {code}"
    return code
