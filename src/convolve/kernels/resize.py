"""Resize image crops into a batch, in native code or torch, with the same bits.

The arithmetic: a triangle filter that widens if the image gets smaller, columns first, then rows. With `scale` inputs
for each output, reach = max(scale, 1) and c = scale (i + 1/2), output i is a sum over the inputs j between c - reach
and c + reach, with weights that fall linearly from c and sum to one:

    weight  = max(0, 1 - |j + 1/2 - c| / reach) / sum of these
    integer = floor(weight 2^bits + 1/2)        `bits`: the most for which the largest one of the axis is below 2^15
    output  = min(255, (sum of integer x byte + 2^(bits - 1)) >> bits)

These are the weights of torch's antialiased bilinear resizing of bytes. They depend on the two sizes only and are
cached.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from convolve.kernels import build

_GROUP = 4  # as in resize.h
_MAX_BITS = 22
_upsample = torch.ops.aten._upsample_bilinear2d_aa.out


class ResizeJob(NamedTuple):
    """An image [h, w, 3] to resize to the dense `target` [H, W, 3], optionally flipped horizontally."""

    pixels: npt.NDArray[np.uint8]
    target: Tensor
    flip: bool


Resize: TypeAlias = Callable[[Sequence[ResizeJob]], None]


class Axis(NamedTuple):
    """Weights [outputs, taps] of one axis, and the first input of each output."""

    first: npt.NDArray[np.int64]
    weights: npt.NDArray[np.int64]
    bits: int


def plan_axis(inputs: int, outputs: int, *, mirrored: bool) -> Axis:
    """Return the weights of each output of an axis. `mirrored` reverses the inputs."""
    scale = inputs / outputs
    reach, inverse = max(scale, 1.0), 1.0 / max(scale, 1.0)
    center = scale * (np.arange(outputs) + 0.5)
    low = np.maximum((center - reach + 0.5).astype(np.int64), 0)
    counts = np.minimum((center + reach + 0.5).astype(np.int64), inputs) - low
    taps = np.arange(int(counts.max()))
    weights = np.maximum(1 - np.abs((taps + low[:, None] - center[:, None] + 0.5) * inverse), 0.0)
    weights[taps >= counts[:, None]] = 0
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # summed from left to right, as in torch
    largest = float(weights.max())
    bits = next(bits for bits in range(_MAX_BITS + 1) if bits == _MAX_BITS or _is_full(largest, bits + 1))
    integers = (0.5 + weights * (1 << bits)).astype(np.int64)
    if mirrored:
        low = inputs - low - len(taps)
        integers = np.ascontiguousarray(integers[:, ::-1])
        integers, low = _clip_start(integers, low)
    return Axis(low, integers, bits)


def _is_full(largest: float, bits: int) -> bool:
    return int(0.5 + largest * (1 << bits)) >= 1 << 15


def _clip_start(weights: npt.NDArray[np.int64], low: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], ...]:
    """Start rows at the first input at the earliest: the weights that they lose in front are zeros."""
    for row in np.flatnonzero(low < 0):
        weights[row] = np.roll(weights[row], low[row])
    return weights, np.maximum(low, 0)


def resize(jobs: Sequence[ResizeJob]) -> None:
    """Run all jobs. Native code releases the GIL."""
    (load() or resize_by_torch)(jobs)


def resize_by_torch(jobs: Sequence[ResizeJob]) -> None:
    """Run all jobs in torch."""
    for pixels, target, flip in jobs:
        part = torch.from_numpy(pixels)
        part = part.flip(1) if flip else part
        size = list(target.shape[:2])
        _upsample(part.permute(2, 0, 1)[None], size, False, None, None, out=target.permute(2, 0, 1)[None])


@cache
def load() -> Resize | None:
    """Load the native form for this CPU; None if it cannot be compiled."""
    library = build.load("resize.c")
    return None if isinstance(library, build.Unavailable) else bind(library)


def bind(library: build.Library) -> Resize:
    """Return the native form of `resize` in a compiled library."""
    call = library.function("convolve_resize", (ctypes.c_void_p, ctypes.c_int))

    def resize_natively(jobs: Sequence[ResizeJob]) -> None:
        fields = array("q")
        plans: list[tuple[npt.NDArray[np.int32], int]] = []  # kept alive while native code reads them
        for pixels, target, flip in jobs:
            height, width, _ = pixels.shape
            rows, columns, _ = target.shape
            across, down = pack_axis(width, columns, flip), pack_axis(height, rows, False)
            plans += (across, down)
            address, stride = pixels.__array_interface__["data"][0], pixels.strides[0]
            fields.extend((address, stride, height, width, across[1], down[1], target.data_ptr()))
        if call(fields.buffer_info()[0], len(jobs)):
            raise MemoryError(f"no memory to resize {len(jobs)} images")

    return resize_natively


@lru_cache(maxsize=4096)
def pack_axis(inputs: int, outputs: int, mirrored: bool) -> tuple[npt.NDArray[np.int32], int]:
    """Return the weights of an axis in the format of resize.h, and their address."""
    axis = plan_axis(inputs, outputs, mirrored=mirrored)
    padded, taps = -(-outputs // _GROUP) * _GROUP, -(-axis.weights.shape[1] // 2) * 2
    first, weights = np.zeros(padded, np.int32), np.zeros((padded, taps), np.int16)
    first[:outputs] = axis.first
    weights[:outputs, : axis.weights.shape[1]] = axis.weights
    packed = np.concatenate((np.array((outputs, taps, axis.bits), np.int32), first, weights.view(np.int32).reshape(-1)))
    return packed, packed.ctypes.data
