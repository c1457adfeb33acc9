"""Randomness inside a network, as a pure function of where and when it is asked for.

A mask must not depend on how a step is laid out: 64 samples at once, 4 x 16 by accumulation or 2 x 32 on replicas all
meet the same numbers, and so does a run that was killed and restored. So nothing is drawn from a stream. Each number is
a hash of (seed, step, place, sample, element), where `sample` is the position in the step's global window and `element`
the position inside the sample.

The arithmetic: every sample has 64 key bits from `randomness.hash_counters`, split into the words a and b, and every
element has a word c. All are int32 with wrapping products and sums, and >>> is the shift that fills with zeros:

    x = element;  x ^= x >>> 16;  x *= 0x7FEB352D;  x ^= x >>> 15;  x *= 0x846CA68B;  x ^= x >>> 16;  c = x
    x = c ^ a;    x ^= x >>> 16;  x *= 0x7FEB352D;  x ^= x >>> 15;  x += b;  x *= 0x846CA68B;  x ^= x >>> 16
    u = (x >> 8) / 2^24 + 1/2                     the top 24 bits, x read as signed: exact in float32, in [0, 1)

Each line is a bijection of 32 bits, so no two elements of a sample share a number's source. The key enters twice, since
with one 32-bit word the samples of a long run would soon repeat one another. int32 is what every device can do.

Layers that several families share: shortcuts without weights, squeeze and excitation, stochastic depth.
"""

from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from convolve.errors import ConfigError
from convolve.rng import hash_counters

_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - (1 << 32)


class Position(NamedTuple):
    """Where a network is in a run: `first` is the place of the micro batch's first sample in the step's window."""

    seed: int
    step: int
    first: int


class KeyedRNG:
    """The source of random numbers that all random layers of one network share.

    `position` may be read before a forward pass and given back to `move` later, which is what a recomputation of that
    pass needs in order to meet the same numbers.
    """

    def __init__(self) -> None:
        self.position: Position | None = None

    def move(self, seed: int, step: int, first: int) -> None:
        """Say which micro batch comes next; to be called before each one."""
        self.position = Position(seed, step, first)

    def uniforms(self, place: str, shape: torch.Size, device: torch.device) -> Tensor:
        """Float32 numbers in [0, 1); row i belongs to sample `first + i`, whatever the other rows are."""
        if self.position is None:
            raise RuntimeError(f"{place}: random numbers were asked for before Chance.move said for which micro batch")
        seed, step, first = self.position
        rows, columns = shape[0], prod(shape[1:])
        keys = hash_counters(np.arange(first, first + rows, dtype=np.int64), seed, step, place)
        words = torch.from_numpy(keys.view(np.int32).reshape(rows, 2)).to(device)
        return _hash(words[:, :1], words[:, 1:], columns).view(shape)


class KeyedDropout(nn.Module):
    """Dropout whose mask depends on sample, step and place only; values that are kept grow by 1 / (1 - rate)."""

    def __init__(self, rate: float, place: str, chance: KeyedRNG) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ConfigError(f"dropout rate {rate} at {place}: must be at least 0 and below 1")
        self.rate = rate
        self.place = place
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        """Drop in training, pass through in evaluation."""
        if not self.training:
            return x
        kept = self.chance.uniforms(self.place, x.shape, x.device) >= self.rate
        return x * kept.to(x.dtype).mul_(1 / (1 - self.rate))

    def extra_repr(self) -> str:
        """What `print(network)` shows."""
        return f"rate={self.rate}, place={self.place!r}"


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


class StochasticDepth(nn.Module):
    """Leaves out a residual branch for some samples (Huang et al. 2016); the mask is keyed like dropout's.

    Branches that stay grow by 1 / survival, so that nothing has to be scaled in evaluation.
    """

    def __init__(self, survival: float, place: str, chance: KeyedRNG) -> None:
        super().__init__()
        self.survival = survival
        self.place = place
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        """Drop whole samples in training, pass through in evaluation."""
        if not self.training:
            return x
        rows = self.chance.uniforms(self.place, torch.Size((x.shape[0], 1)), x.device)
        kept = (rows < self.survival).to(x.dtype).mul_(1 / self.survival)
        return x * kept[:, :, None, None]

    def extra_repr(self) -> str:
        """What `print(network)` shows."""
        return f"survival={self.survival}, place={self.place!r}"
