"""Mixup and cutmix, planned for a whole global batch, so micro batches and replicas do not change them.

The arithmetic, for sample i of a global batch of n (positions are modulo n):

    mixup     m_i = max(b, 1 - b), b ~ Beta(alpha, alpha);   u_i = m_i x_i + (1 - m_i) x_(i-1)
    cutmix    one lambda for the global batch; a box of sides sqrt(1 - lambda), inside the image, is filled from the
              image two positions before (one if n = 2); lambda is then recomputed from the pixels of the box
    both      cutmix of the images u, so there are four labels i, i-1, i-2, i-3 with the weights
              m_i lambda, (1 - m_i) lambda, m_(i-2) (1 - lambda), (1 - m_(i-2)) (1 - lambda)

Dense targets (several labels, soft labels) are mixed with these weights into one target, since both losses are linear
in the target.

Sources of lambda: version 1 draws lambda = 1 with probability 1.55 L - 0.96, otherwise 1 + ln(u) / 4 with u uniform in
[e^-4, 1], which has about the mean L. Version 2 uses L itself. `uniform` draws from [low, high), or skips cutmix with a
probability.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from convolve.data.dataset import Targets
from convolve.rng import Indices, generator

Key = tuple[int, int, int]
Coefficients = npt.NDArray[np.float64]


class MixPlan(Protocol):
    """How the samples of one global batch are mixed; positions are those in the global batch."""

    def partners(self, positions: Indices) -> Indices:
        """Return the positions outside a micro batch whose images are mixed into it."""

    def apply(
        self, images: Tensor, labels: Tensor, positions: Indices, fetched: Indices
    ) -> tuple[Tensor, Targets | None]:
        """Mix the images [M, C, H, W] at the `fetched` positions into those of the micro batch."""


class MixPlanner(Protocol):
    """Plans the mixing of each global batch."""

    def plan(self, count: int, key: Key) -> MixPlan:
        """Plan a global batch of `count` samples; `key` is the seed, the epoch and its first sample."""


class NoMixing:
    """The null object: every sample stays as it is."""

    def plan(self, count: int, key: Key) -> MixPlan:
        return self

    def partners(self, positions: Indices) -> Indices:
        return np.empty(0, np.int64)

    def apply(
        self, images: Tensor, labels: Tensor, positions: Indices, fetched: Indices
    ) -> tuple[Tensor, Targets | None]:
        return images, None


NO_MIXING = NoMixing()


@dataclass(frozen=True)
class Cutmix:
    """Source of lambda, the fraction of the base image that is kept; 1 leaves every image whole."""

    version: Literal["random", "constant", "uniform"] = "constant"
    fraction: float = 1.0
    low: float = 1.0
    high: float = 1.0
    disable_probability: float = 0.0

    def draw(self, rng: np.random.Generator) -> float:
        """Return the fraction kept in one global batch."""
        first, second = rng.random(2)
        if self.version == "constant":
            return self.fraction
        if self.version == "uniform":
            return 1.0 if first < self.disable_probability else self.low + (self.high - self.low) * second
        if first < 1.55 * self.fraction - 0.96:
            return 1.0
        lowest = math.exp(-4)
        return 1 + math.log(lowest + (1 - lowest) * second) / 4


@dataclass(frozen=True)
class Mixing:
    """Mixup, cutmix, or both."""

    mixup_alpha: float = 0.0
    cutmix: Cutmix | None = None

    def plan(self, count: int, key: Key) -> MixPlan:
        """Draw the coefficients and the box of one global batch."""
        coefficients = np.ones(count)
        if self.mixup_alpha > 0:
            drawn = generator(key[0], "mixup", *key[1:]).beta(self.mixup_alpha, self.mixup_alpha, count)
            coefficients = np.maximum(drawn, 1 - drawn)
        kept, corner = 1.0, (0.0, 0.0)
        if self.cutmix is not None:
            rng = generator(key[0], "cutmix", *key[1:])
            kept = self.cutmix.draw(rng)
            corner = (float(rng.random()), float(rng.random()))
        return MixupCutmix(count, coefficients, self.mixup_alpha > 0, kept, corner)


@dataclass(frozen=True)
class MixupCutmix:
    """Mixup coefficients of one global batch, the fraction that cutmix keeps, and the corner of its box."""

    count: int
    coefficients: Coefficients
    blends: bool
    kept: float
    corner: tuple[float, float]

    @property
    def _cut_shift(self) -> int:
        return 1 if self.count == 2 else 2

    @property
    def _shifts(self) -> tuple[int, ...]:
        """How many positions before a sample each partner is."""
        blend = (0, 1) if self.blends else (0,)
        cut = (0, self._cut_shift) if self.kept < 1 else (0,)
        return tuple(first + second for second in cut for first in blend)

    def partners(self, positions: Indices) -> Indices:
        return np.setdiff1d(np.concatenate([(positions - shift) % self.count for shift in self._shifts]), positions)

    def apply(
        self, images: Tensor, labels: Tensor, positions: Indices, fetched: Indices
    ) -> tuple[Tensor, Targets | None]:
        """Return the mixed images, and their labels with weights."""
        row_of = np.zeros(self.count, np.int64)
        row_of[fetched] = np.arange(len(fetched))
        pick = [torch.from_numpy(row_of[(positions - shift) % self.count]).to(images.device) for shift in self._shifts]
        pairs = 2 if self.blends else 1
        mixed, weights = self._blend(images, pick[:pairs], positions)
        if self.kept < 1:
            pasted, pasted_weights = self._blend(images, pick[pairs:], (positions - self._cut_shift) % self.count)
            kept = self._paste(mixed, pasted)
            weights = [weight * kept for weight in weights] + [weight * (1 - kept) for weight in pasted_weights]
        stacked = torch.from_numpy(np.stack(weights).astype(np.float32)).to(images.device)
        picked = torch.stack([labels.index_select(0, rows) for rows in pick])
        if labels.ndim == 2:
            return mixed, Targets((picked * stacked[..., None]).sum(0))
        return mixed, Targets(picked, stacked)

    def _blend(self, images: Tensor, pick: list[Tensor], positions: Indices) -> tuple[Tensor, list[Coefficients]]:
        weights = self.coefficients[positions]
        base = images.index_select(0, pick[0])
        if not self.blends:
            return base, [weights]
        factors = torch.from_numpy(weights.astype(np.float32)).to(images.device)[:, None, None, None]
        return base.mul_(factors).addcmul_(images.index_select(0, pick[1]), 1 - factors), [weights, 1 - weights]

    def _paste(self, mixed: Tensor, other: Tensor) -> float:
        """Fill the box in place and return the fraction of pixels that is kept."""
        height, width = mixed.shape[2:]
        side = math.sqrt(1 - self.kept)
        rows, columns = round(height * side), round(width * side)
        top = int(self.corner[0] * (height - rows + 1))
        left = int(self.corner[1] * (width - columns + 1))
        box = (slice(None), slice(None), slice(top, top + rows), slice(left, left + columns))
        mixed[box] = other[box]
        return 1 - rows * columns / (height * width)
