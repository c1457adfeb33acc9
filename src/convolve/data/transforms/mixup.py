"""Mixup and cutmix, planned for a whole window, so that the number of micro batches or replicas cannot change them.

The arithmetic, for sample i of a window of n (places count modulo n):

    mixup     m_i = max(b, 1 - b), b ~ Beta(alpha, alpha);   u_i = m_i x_i + (1 - m_i) x_(i-1)
    cutmix    one lambda for the window; a box of sides sqrt(1 - lambda), wholly inside the image, is filled from
              the image two places before (one, where n = 2); lambda is then recomputed from the pixels of the box
    both      cutmix of the images u, so there are four labels i, i-1, i-2, i-3 with the weights
              m_i lambda, (1 - m_i) lambda, m_(i-2) (1 - lambda), (1 - m_(i-2)) (1 - lambda)

Where lambda comes from: version 1 draws lambda = 1 with probability 1.55 L - 0.96, otherwise 1 + ln(u) / 4 with u
uniform in [e^-4, 1], which has about the mean L; version 2 takes L itself; `uniform` draws from [low, high), or leaves
cutmix out with a probability.
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


class MixPlanner(Protocol):
    """How the samples of one window are mixed."""

    def needed(self, places: Indices) -> Indices:
        """The places whose images a micro batch needs: its own first, then those of partners."""

    def apply(self, images: Tensor, labels: Tensor, places: Indices, needed: Indices) -> tuple[Tensor, Targets | None]:
        """Mix the needed images [M, C, H, W] into those of the micro batch."""


class Mixer(Protocol):
    """Makes a recipe for each window."""

    def plan(self, count: int, key: Key) -> MixPlanner:
        """The recipe for a window of `count` samples; `key` is the seed, the epoch and the window's first sample."""


class NoMixing:
    """The null object: every sample stays what it is."""

    def plan(self, count: int, key: Key) -> MixPlanner:
        """Nothing to plan."""
        return self

    def needed(self, places: Indices) -> Indices:
        """Only the samples themselves."""
        return places

    def apply(self, images: Tensor, labels: Tensor, places: Indices, needed: Indices) -> tuple[Tensor, Targets | None]:
        """Images as they are."""
        return images, None


NO_MIXING = NoMixing()


@dataclass(frozen=True)
class Cutmix:
    """Where lambda, the share kept of the base image, comes from; 1 leaves every image whole."""

    version: Literal["random", "constant", "uniform"] = "constant"
    share: float = 1.0
    low: float = 1.0
    high: float = 1.0
    disable_probability: float = 0.0

    def draw(self, chance: np.random.Generator) -> float:
        """The share kept in one window."""
        first, second = chance.random(2)
        if self.version == "constant":
            return self.share
        if self.version == "uniform":
            return 1.0 if first < self.disable_probability else self.low + (self.high - self.low) * second
        if first < 1.55 * self.share - 0.96:
            return 1.0
        lowest = math.exp(-4)
        return 1 + math.log(lowest + (1 - lowest) * second) / 4


@dataclass(frozen=True)
class Mixing:
    """Mixup, cutmix, or both."""

    mixup_alpha: float = 0.0
    cutmix: Cutmix | None = None

    def plan(self, count: int, key: Key) -> MixPlanner:
        """Draw coefficients and the box for one window."""
        coefficients = np.ones(count)
        if self.mixup_alpha > 0:
            drawn = generator(key[0], "mixup", *key[1:]).beta(self.mixup_alpha, self.mixup_alpha, count)
            coefficients = np.maximum(drawn, 1 - drawn)
        share, corner = 1.0, (0.0, 0.0)
        if self.cutmix is not None:
            chance = generator(key[0], "cutmix", *key[1:])
            share = self.cutmix.draw(chance)
            corner = (float(chance.random()), float(chance.random()))
        return MixupCutmix(count, coefficients, self.mixup_alpha > 0, share, corner)


@dataclass(frozen=True)
class MixupCutmix:
    """One window's coefficients of mixup, the share that cutmix keeps, and where its box lies."""

    count: int
    coefficients: Coefficients
    blends: bool
    share: float
    corner: tuple[float, float]

    @property
    def _cut_shift(self) -> int:
        return 1 if self.count == 2 else 2

    @property
    def _shifts(self) -> tuple[int, ...]:
        """How far before a sample the partners stand."""
        blend = (0, 1) if self.blends else (0,)
        cut = (0, self._cut_shift) if self.share < 1 else (0,)
        return tuple(first + second for second in cut for first in blend)

    def needed(self, places: Indices) -> Indices:
        """The places of the micro batch, then those of partners outside it."""
        partners = np.unique(np.concatenate([(places - shift) % self.count for shift in self._shifts]))
        return np.concatenate((places, np.setdiff1d(partners, places)))

    def apply(self, images: Tensor, labels: Tensor, places: Indices, needed: Indices) -> tuple[Tensor, Targets | None]:
        """Mix the images and say which labels count how much."""
        at = np.zeros(self.count, np.int64)
        at[needed] = np.arange(len(needed))
        pick = [torch.from_numpy(at[(places - shift) % self.count]).to(images.device) for shift in self._shifts]
        pairs = 2 if self.blends else 1
        mixed, weights = self._blend(images, pick[:pairs], places)
        if self.share < 1:
            pasted, pasted_weights = self._blend(images, pick[pairs:], (places - self._cut_shift) % self.count)
            kept = self._paste(mixed, pasted)
            weights = [weight * kept for weight in weights] + [weight * (1 - kept) for weight in pasted_weights]
        shares = torch.from_numpy(np.stack(weights).astype(np.float32)).to(images.device)
        return mixed, Targets(torch.stack([labels.index_select(0, rows) for rows in pick]), shares)

    def _blend(self, images: Tensor, pick: list[Tensor], places: Indices) -> tuple[Tensor, list[Coefficients]]:
        own = self.coefficients[places]
        base = images.index_select(0, pick[0])
        if not self.blends:
            return base, [own]
        shares = torch.from_numpy(own.astype(np.float32)).to(images.device)[:, None, None, None]
        return base.mul_(shares).addcmul_(images.index_select(0, pick[1]), 1 - shares), [own, 1 - own]

    def _paste(self, mixed: Tensor, other: Tensor) -> float:
        """Fill the box in place and return the share of pixels that is kept."""
        height, width = mixed.shape[2:]
        side = math.sqrt(1 - self.share)
        rows, columns = round(height * side), round(width * side)
        top = int(self.corner[0] * (height - rows + 1))
        left = int(self.corner[1] * (width - columns + 1))
        box = (slice(None), slice(None), slice(top, top + rows), slice(left, left + columns))
        mixed[box] = other[box]
        return 1 - rows * columns / (height * width)
