"""Dropout and stochastic depth with keyed masks.

A mask must not depend on the layout of a step: 64 samples in one pass, 4 x 16 by accumulation and 2 x 32 on replicas
get the same numbers, and so does a run that was killed and restored. So no number is drawn from a stream. Each one is a
hash of (seed, step, site, sample, element): `rng.at` sets seed, step and first sample of a pass, the site is the name
of the layer, `sample` is the index in the global batch and `element` the index inside the sample.

The arithmetic: every sample has 64 key bits from `rng.hash_counters`, split into the words a and b, and every element
has a word c. All are int32 with wrapping products and sums, and >>> is the shift that fills with zeros:

    x = element;  x ^= x >>> 16;  x *= 0x7FEB352D;  x ^= x >>> 15;  x *= 0x846CA68B;  x ^= x >>> 16;  c = x
    x = c ^ a;    x ^= x >>> 16;  x *= 0x7FEB352D;  x ^= x >>> 15;  x += b;  x *= 0x846CA68B;  x ^= x >>> 16
    u = (x >> 8) / 2^24 + 1/2                     the top 24 bits, x read as signed: exact in float32, in [0, 1)

Each line is a bijection of 32 bits, so no two elements of a sample share a number's source. The key enters twice, since
with one 32-bit word the samples of a long run would soon repeat one another. Every device supports int32.
"""

from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from convolve import rng
from convolve.errors import ConfigError
from convolve.layers.hooks import bookkeeping

_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - (1 << 32)


def keyed_rand(site: str, shape: torch.Size, device: torch.device) -> Tensor:
    """Return float32 numbers in [0, 1) for the current pass; row i depends on sample `first + i` only."""
    position = rng.position()
    if position is None:
        raise RuntimeError(f"{site}: random layer outside of a training pass; wrap the pass in `with rng.at(...)`")
    seed, step, first = position
    rows, columns = shape[0], prod(shape[1:])
    keys = rng.hash_counters(np.arange(first, first + rows, dtype=np.int64), seed, step, site)
    with bookkeeping():
        words = torch.from_numpy(keys.view(np.int32).reshape(rows, 2)).to(device)
        return _hash(words[:, :1], words[:, 1:], columns).view(shape)


class KeyedDropout(nn.Module):
    """Dropout whose mask depends on sample, step and site only. Values that are not dropped grow by 1 / (1 - rate)."""

    def __init__(self, rate: float, site: str) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ConfigError(f"dropout rate {rate} at {site}: must be at least 0 and below 1")
        self.rate = rate
        self.site = site

    def forward(self, x: Tensor) -> Tensor:
        """Drop in training, pass through in evaluation."""
        if not self.training:
            return x
        mask = keyed_rand(self.site, x.shape, x.device) >= self.rate
        return x * mask.to(x.dtype).mul_(1 / (1 - self.rate))

    def extra_repr(self) -> str:
        return f"rate={self.rate}, site={self.site!r}"


class StochasticDepth(nn.Module):
    """Skips a residual branch for some samples (Huang et al. 2016); the mask is keyed like dropout's.

    Branches that are not skipped grow by 1 / survival, so evaluation needs no scaling.
    """

    def __init__(self, survival: float, site: str) -> None:
        super().__init__()
        self.survival = survival
        self.site = site

    def forward(self, x: Tensor) -> Tensor:
        """Drop whole samples in training, pass through in evaluation."""
        if not self.training:
            return x
        rows = keyed_rand(self.site, torch.Size((x.shape[0], 1)), x.device)
        mask = (rows < self.survival).to(x.dtype).mul_(1 / self.survival)
        return x * mask[:, :, None, None]

    def extra_repr(self) -> str:
        return f"survival={self.survival}, site={self.site!r}"


def _hash(a: Tensor, b: Tensor, columns: int) -> Tensor:
    element = torch.arange(columns, dtype=torch.int32, device=a.device)
    x = _mix_bits(element, torch.zeros_like(element)) ^ a
    x = _mix_bits(x, b)
    return x.bitwise_right_shift_(8).to(torch.float32).mul_(2.0**-24).add_(0.5)


def _mix_bits(x: Tensor, b: Tensor) -> Tensor:
    spare = torch.empty_like(x)
    _fold(x, 16, spare)
    x.mul_(_FIRST)
    _fold(x, 15, spare)
    x.add_(b).mul_(_SECOND)
    _fold(x, 16, spare)
    return x


def _fold(x: Tensor, shift: int, spare: Tensor) -> None:
    torch.bitwise_right_shift(x, shift, out=spare)
    spare.bitwise_and_((1 << (32 - shift)) - 1)
    x.bitwise_xor_(spare)
