"""Batches for training and evaluation, whatever the samples are kept in.

A position in training is one integer, the number of samples seen. A window is what one step consumes: up to a global
batch of consecutive samples of the epoch's order, never across the end of an epoch, so the last window of an epoch may
be short. Replicas share a window: each takes every n-th micro batch of it. Augmentation is keyed by (seed, epoch,
sample), mixing by the place in the window, so neither micro batches nor replicas nor workers can change a sample.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from convolve.data.dataset import Labels, Split, Targets
from convolve.data.loader.in_memory import InMemoryFetcher
from convolve.data.transforms.augment import NO_AUGMENT, Augment
from convolve.data.transforms.mixup import NO_MIXING, Mixer, MixPlanner
from convolve.data.transforms.normalize import Transform
from convolve.rng import Indices, SampleRNG, epoch_permutation

Pixels = Callable[[], tuple[Tensor, Indices]]


@dataclass(frozen=True)
class ReplicaShard:
    """Which share of every window one replica takes."""

    index: int = 0
    count: int = 1


WHOLE = ReplicaShard()


@dataclass(frozen=True)
class MicroBatch:
    """One micro batch. `labels` are the base labels, which accuracy counts against; `mixed` is what the loss learns
    from instead where images were mixed; `first` is the position of the first sample inside the window."""

    images: Tensor
    labels: Tensor
    first: int
    mixed: Targets | None = None

    @property
    def targets(self) -> Targets:
        """What the loss learns from."""
        return self.mixed or Targets(self.labels)


@dataclass(frozen=True)
class StepBatch:
    """The micro batches of one step that this replica runs.

    `samples` is how far the whole window, over all replicas, moves the position.
    """

    batches: tuple[MicroBatch, ...]
    samples: int
    left_out: int = 0

    @property
    def counted(self) -> int:
        """The number that the mean divides by: broken samples that were left out do not count."""
        return self.samples - self.left_out


class Loader(Protocol):
    """All that the engine knows of data."""

    waited_seconds: float

    @property
    def skipped(self) -> list[str]:
        """Why samples were left out so far, one line each."""

    def __len__(self) -> int: ...

    def windows(
        self, seed: int, position: int, sizes: tuple[int, int], part: ReplicaShard = WHOLE
    ) -> Iterator[StepBatch]:
        """Windows from a position on, for ever; `sizes` are the micro batch and the global batch."""

    def batches(self, size: int, part: ReplicaShard = WHOLE) -> Iterator[MicroBatch]:
        """Every sample once, in storage order."""


class Fetcher(Protocol):
    """Samples that can be fetched by number."""

    labels: Labels
    ahead: int
    skipped: list[str]

    def begin(self, rows: Indices, draw: SampleRNG | None) -> Pixels:
        """Start to fetch samples, augmented if there is a draw; the call gives pixels [N, H, W, C] and the places in
        `rows` that could be read."""


class FetchingLoader:
    """Windows and batches of a stock: begun `stock.ahead` in advance, normalized on `site`, mixed on the device."""

    def __init__(
        self,
        stock: Fetcher,
        transform: Transform,
        device: torch.device,
        mixer: Mixer = NO_MIXING,
        site: torch.device | None = None,
    ) -> None:
        self._stock = stock
        self._labels = torch.from_numpy(stock.labels).to(device)
        self._transform = transform
        self._device = device
        self._site = site or device
        self._mixer = mixer
        self.waited_seconds = 0.0

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def skipped(self) -> list[str]:
        """Names of the samples that could not be read so far."""
        return self._stock.skipped

    def windows(
        self, seed: int, position: int, sizes: tuple[int, int], part: ReplicaShard = WHOLE
    ) -> Iterator[StepBatch]:
        """Windows from a position on, for ever; `sizes` are the micro batch and the global batch."""
        begun: deque[_PendingStep] = deque()
        plans = self._plan(seed, position, sizes[1])
        while True:
            while len(begun) <= self._stock.ahead:
                rows, draw = next(plans)
                begun.append(self._begin(rows, draw, sizes[0], part))
            yield self._finish(begun.popleft())

    def batches(self, size: int, part: ReplicaShard = WHOLE) -> Iterator[MicroBatch]:
        """Every sample once, in storage order."""
        starts = list(range(0, len(self), size))[part.index :: part.count]
        begun: deque[tuple[Indices, Pixels]] = deque()
        for start in starts:
            rows = np.arange(start, min(start + size, len(self)))
            begun.append((rows, self._stock.begin(rows, None)))
            if len(begun) > self._stock.ahead:
                yield self._plain(*begun.popleft())
        while begun:
            yield self._plain(*begun.popleft())

    def _plan(self, seed: int, position: int, global_batch_size: int) -> Iterator[tuple[Indices, SampleRNG]]:
        while True:
            epoch, offset = divmod(position, len(self))
            order = epoch_permutation(seed, epoch, len(self))
            for start in range(offset, len(self), global_batch_size):
                yield order[start : start + global_batch_size], SampleRNG(seed, epoch)
            position = (epoch + 1) * len(self)

    def _begin(self, rows: Indices, draw: SampleRNG, micro_batch_size: int, part: ReplicaShard) -> "_PendingStep":
        recipe = self._mixer.plan(len(rows), (draw.seed, draw.epoch, int(rows[0])))
        firsts = list(range(0, len(rows), micro_batch_size))[part.index :: part.count]
        places = [np.arange(first, min(first + micro_batch_size, len(rows))) for first in firsts]
        needed = [recipe.needed(place) for place in places]
        pixels = [self._stock.begin(rows[place], draw) for place in needed]
        return _PendingStep(rows, places, needed, pixels, recipe)

    def _finish(self, begun: "_PendingStep") -> StepBatch:
        started = time.perf_counter()
        parts = [self._mix(begun, index) for index in range(len(begun.places))]
        self.waited_seconds += time.perf_counter() - started
        lost = sum(len(place) for place in begun.places) - sum(len(batch.labels) for batch in parts)
        return StepBatch(tuple(batch for batch in parts if len(batch.labels)), len(begun.rows), lost)

    def _mix(self, begun: "_PendingStep", index: int) -> MicroBatch:
        """One micro batch: its own samples come first among the needed ones, their partners after them."""
        place, needed = begun.places[index], begun.needed[index]
        pixels, kept = begun.pixels[index]()
        images = self._normalize(pixels)
        labels = self._labels_of(begun.rows[needed[kept]])
        if len(kept) < len(needed):  # a broken partner: this micro batch is learned from unmixed
            own = int((kept < len(place)).sum())
            return MicroBatch(images[:own], labels[:own], int(place[0]))
        images, targets = begun.recipe.apply(images, labels, place, needed)
        return MicroBatch(images, labels[: len(place)], int(place[0]), targets)

    def _plain(self, rows: Indices, fetch: Pixels) -> MicroBatch:
        pixels, kept = fetch()
        labels = self._labels_of(rows[kept])
        return MicroBatch(self._normalize(pixels), labels, 0)

    def _normalize(self, pixels: Tensor) -> Tensor:
        return self._transform(pixels.to(self._site)).to(self._device)

    def _labels_of(self, rows: Indices) -> Tensor:
        return self._labels.index_select(0, torch.from_numpy(rows).to(self._device))


@dataclass(frozen=True)
class _PendingStep:
    rows: Indices
    places: Sequence[Indices]
    needed: Sequence[Indices]
    pixels: Sequence[Pixels]
    recipe: MixPlanner


class MemoryLoader(FetchingLoader):
    """Batches of a split in memory."""

    def __init__(
        self,
        split: Split,
        transform: Transform,
        device: torch.device,
        augment: Augment = NO_AUGMENT,
        mixer: Mixer = NO_MIXING,
    ) -> None:
        super().__init__(InMemoryFetcher(split, transform, device, augment), transform, device, mixer)
