"""Round float32 tensors in place to the grid of a format. The arithmetic is explained in kernels/csrc/rounding.c.

There are two implementations with the same bits: the native kernel for dense CPU tensors, and torch operations for all
others. Stochastic rounding takes its random bits from a hash of a 64-bit key and the index i of an element in memory:

    h = i * 0x9E3779B9 + a;  h ^= h >> 16;  h *= 0x7FEB352D;  h ^= h >> 15;  h += b;  h *= 0x846CA68B;  h ^= h >> 16

with a and b the low and high half of the key, all modulo 2^32 (a grows by 0x85EBCA6B for every 2^32 elements).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntFlag

import torch
from torch import Tensor

from convolve.kernels import rounding
from convolve.numerics.formats import BF16, FP16, FP32, Format

_SIGNED = 1 << 32
_INFINITY = 0x7F800000
_KINDS = {(FP16, False): 0, (BF16, False): 1, (FP16, True): 2, (BF16, True): 3, (FP32, False): 4, (FP32, True): 4}


class Flags(IntFlag):
    """Conditions found while rounding: a finite value out of range (or a clamped infinity), a NaN, an infinity."""

    NONE = 0
    OVERFLOW = 1
    NAN = 2
    INFINITY = 4


@dataclass(frozen=True)
class Grid:
    """Grid of representable values. Values out of range become infinite, or the largest value if `saturate` is set."""

    format: Format
    saturate: bool = False


def round_(x: Tensor, grid: Grid, key: int | None = None) -> int:
    """Round a float32 tensor in place, to nearest even or stochastically with a 64-bit key. Return `Flags`."""
    return _round(x, grid, key, round_with_torch_)


def round_without_flags_(x: Tensor, grid: Grid, key: int | None = None) -> None:
    """Round as `round_`, but never wait for a device."""
    _round(x, grid, key, _round_on_device_)


def _round(x: Tensor, grid: Grid, key: int | None, with_torch: Callable[[Tensor, Grid, int | None], int]) -> int:
    if x.numel() == 0:
        return 0
    if not _is_dense(x):
        dense = x.clone(memory_format=torch.contiguous_format)
        flags = _round(dense, grid, key, with_torch)
        x.copy_(dense)
        return flags
    native = rounding.load() if x.device.type == "cpu" and x.dtype == torch.float32 else None
    if native is None:
        return with_torch(x, grid, key)
    kind = _KINDS[grid.format, key is not None]
    return native.round_(x, kind, clamped=grid.saturate, key=key or 0)


def rounded(x: Tensor, grid: Grid, key: int | None = None) -> Tensor:
    """Return a rounded copy in the memory layout of the original."""
    copy = x.detach().clone()
    round_(copy, grid, key)
    return copy


def round_with_torch_(x: Tensor, grid: Grid, key: int | None = None) -> int:
    """Round a dense tensor with torch operations, for devices and machines without the native kernel."""
    return _flags(*_round_words(x, grid, key))


def _round_on_device_(x: Tensor, grid: Grid, key: int | None) -> int:
    _round_words(x, grid, key)
    return 0


def _round_words(x: Tensor, grid: Grid, key: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Round in place; return which values left the range, are NaN and are infinite."""
    flat = _in_memory_order(x)
    word = flat.view(torch.int32)
    sign = word & -0x80000000
    m = word & 0x7FFFFFFF
    nan, infinite = m > _INFINITY, m == _INFINITY
    if grid.format is FP32:
        return torch.zeros_like(nan), nan, infinite
    largest = {FP16: 0x477FE000, BF16: 0x7F7F0000}[grid.format]
    r = _nearest(m, grid.format) if key is None else _stochastic(m, grid.format, key)
    # Only a NaN can overflow the 31 bits; it is restored below.
    over = (r > largest) | (r < 0)
    out_of_range = over & ~nan & (~infinite | grid.saturate)
    r = torch.where(over, largest if grid.saturate else _INFINITY, r)
    r = torch.where(nan, m, r)
    flat.copy_((r | sign).view(torch.float32))
    return out_of_range, nan, infinite


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last))


def _in_memory_order(x: Tensor) -> Tensor:
    return (x if x.is_contiguous() else x.permute(0, 2, 3, 1)).reshape(-1)


def _flags(out_of_range: Tensor, nan: Tensor, infinite: Tensor) -> int:
    bits = torch.stack((out_of_range.any(), nan.any(), infinite.any())).tolist()
    return sum(bit << index for index, bit in enumerate(bits))


def _nearest(m: Tensor, target: Format) -> Tensor:
    if target is BF16:
        return (m + 0x7FFF + ((m >> 16) & 1)) & ~0xFFFF
    normal = (m + 0xFFF + ((m >> 13) & 1)) & ~0x1FFF
    small = ((m.view(torch.float32) + 0.75) - 0.75).view(torch.int32)
    return torch.where(m < 0x38800000, small, normal)


def _stochastic(m: Tensor, target: Format, key: int) -> Tensor:
    h = hash_elements(m.numel(), key, m.device)
    if target is BF16:
        return (m + _shift(h, 16)) & ~0xFFFF
    normal = (m + _shift(h, 19)) & ~0x1FFF
    scaled = torch.where(m < 0x38800000, m, 0).view(torch.float32) * 2.0**24
    below = scaled.to(torch.int32)
    threshold = ((scaled - below) * 2.0**31).to(torch.int32)
    up = _shift(h, 1) < threshold
    small = ((below + up).to(torch.float32) * 2.0**-24).view(torch.int32)
    return torch.where(m < 0x38800000, small, normal)


def hash_elements(count: int, key: int, device: torch.device) -> Tensor:
    """Return 32 random bits, as int32, for each of `count` elements under a key."""
    position = torch.arange(count, dtype=torch.int64, device=device)
    a = _signed(key) + (position >> 32) * _signed(0x85EBCA6B)
    h = (position * _signed(0x9E3779B9) + a).to(torch.int32)
    h ^= _shift(h, 16)
    h *= 0x7FEB352D
    h ^= _shift(h, 15)
    h += _signed(key >> 32)
    h *= _signed(0x846CA68B)
    return h ^ _shift(h, 16)


def _shift(x: Tensor, count: int) -> Tensor:
    """Shift right and fill with zeros."""
    return (x >> count) & ((1 << (32 - count)) - 1)


def _signed(word: int) -> int:
    word &= _SIGNED - 1
    return word - _SIGNED if word >= _SIGNED >> 1 else word
