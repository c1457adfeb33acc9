"""Batches for training and evaluation.

A position in training is one integer, the number of samples seen. Each step consumes a global batch: consecutive
samples of the epoch's permutation, never across the end of an epoch, so the last global batch of an epoch may be short.
Its micro batches are divided among replicas (`ReplicaShard`). Augmentation is keyed by (seed, epoch, sample) and
mixing by the position in the global batch, so a sample does not depend on micro batches, replicas or workers.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from convolve.data.dataset import Labels, Targets
from convolve.data.sampling import EpochOrder, Sampler, ShuffleSampler
from convolve.data.transforms.mixup import NO_MIXING, MixPlan, MixPlanner
from convolve.data.transforms.normalize import Transform
from convolve.device import copy_to
from convolve.rng import Indices, SampleRNG


class Fetched(NamedTuple):
    """Pixels [N, H, W, C] of the samples that could be read, their positions among those requested, and their labels
    if a reader knows them only now."""

    pixels: Tensor
    kept: Indices
    labels: Tensor | None = None


PendingPixels = Callable[[], Fetched]


@dataclass(frozen=True)
class ReplicaShard:
    """The micro batches of each step that replica `index` of `count` runs.

    Without a batch-norm span they are consecutive. A span of s joins micro batches k s to k s + s - 1, which run on s
    neighboring replicas at the same time, and such a group of replicas runs consecutive spans. The gradients of a step
    are summed in a tree (`convolve.summation`) whose leaves are its micro batches, ordered by their place in the span,
    then by number. So those of a replica are consecutive leaves in any layout, and a micro batch is the same leaf in
    every layout.

    `needs_images` is False for a pipeline stage other than the first: it knows the images by their number only.
    """

    index: int = 0
    count: int = 1
    span: int = field(default=1, repr=False)
    needs_images: bool = field(default=True, repr=False)

    def numbers(self, micro_batches: int) -> range:
        """Return the numbers of the micro batches of this replica in a step that has so many."""
        group, place = divmod(self.index, self.span)
        groups, spans = self.count // self.span, -(-micro_batches // self.span)
        first, last = (-(-spans * bound // groups) for bound in (group, group + 1))
        return range(first * self.span + place, min(last * self.span, micro_batches), self.span)

    def leaves(self, micro_batches: int) -> range:
        """Return the leaves of the micro batches of this replica."""
        numbers, place = self.numbers(micro_batches), self.index % self.span
        before = sum(-(-(micro_batches - other) // self.span) for other in range(place))
        first = before + numbers.start // self.span
        return range(first, first + len(numbers))


WHOLE = ReplicaShard()


@dataclass(frozen=True)
class MicroBatch:
    """One micro batch. Accuracy is computed against `labels`, the loss against `targets`, which are mixed if the images
    are. Labels are class numbers [N], or floats [N, classes] if an image has several labels or soft ones.

    `first` is the position of the first sample in the global batch, `number` that of the micro batch, and `leaf` that
    of its gradient in the sum.
    """

    images: Tensor
    labels: Tensor
    first: int
    mixed: Targets | None = None
    number: int = 0
    leaf: int = 0

    @property
    def targets(self) -> Targets:
        return self.mixed or Targets(self.labels)


@dataclass(frozen=True)
class StepBatch:
    """The micro batches of one step that this replica runs; `global_samples` counts the samples of all replicas.

    `count` is the number of micro batches of all replicas; `even` is False if replicas have different numbers or sizes.
    `leaves` are those of this replica in the sum of gradients, also of micro batches without a readable sample.
    """

    micro_batches: tuple[MicroBatch, ...]
    global_samples: int
    skipped_samples: int = 0
    count: int = 1
    even: bool = True
    leaves: range = range(1)

    @property
    def used_samples(self) -> int:
        """Divisor of the mean loss: skipped broken samples do not count."""
        return self.global_samples - self.skipped_samples


class Fetcher(Protocol):
    """Random-access source of samples, augmented on request.

    `can_skip_images` is True if a process without use for images may read none: labels are known, and none is skipped.
    """

    labels: Labels
    ahead: int
    skipped: list[str]

    @property
    def can_skip_images(self) -> bool: ...

    def start(self, rows: Indices, rng: SampleRNG | None, keys: Indices | None = None) -> PendingPixels:
        """Start to fetch samples, augmented if `rng` is given. The returned function waits for them.

        `keys` are the sample numbers of the augmentation, if a sample is drawn several times in an epoch.
        """


class Loader:
    """Batches from a fetcher, prefetched `fetcher.ahead` steps, normalized on `site` and mixed on the device.

    `waited_seconds` is the time that training steps spent waiting for data.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        transform: Transform,
        device: torch.device,
        mixing: MixPlanner = NO_MIXING,
        site: torch.device | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self._fetcher = fetcher
        self._sampler = sampler or ShuffleSampler(len(fetcher.labels))
        known = torch.from_numpy(fetcher.labels)
        self._labels = (known.float() if known.ndim == 2 else known).to(device)
        self._transform = transform
        self._device = device
        self._site = site or device
        self._mixing = mixing
        self.waited_seconds = 0.0

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def skipped(self) -> list[str]:
        """Why samples were skipped so far, one line each."""
        return self._fetcher.skipped

    def step_batches(
        self, seed: int, position: int, micro_batch_size: int, global_batch_size: int, shard: ReplicaShard = WHOLE
    ) -> Iterator[StepBatch]:
        """Yield the batches of all steps from a position on, without end."""
        pending: deque[_PendingStep] = deque()
        plans = self._plan(seed, position, global_batch_size)
        while True:
            while len(pending) <= self._fetcher.ahead:
                order, rng = next(plans)
                pending.append(self._start(order, rng, micro_batch_size, shard))
            yield self._finish(pending.popleft())

    def batches(self, size: int, shard: ReplicaShard = WHOLE) -> Iterator[MicroBatch]:
        """Yield every sample once, in storage order."""
        starts = list(range(0, len(self), size))[shard.index :: shard.count]
        pending: deque[tuple[Indices, PendingPixels]] = deque()
        for start in starts:
            rows = np.arange(start, min(start + size, len(self)))
            pending.append((rows, self._fetch(shard, rows, None, rows)))
            if len(pending) > self._fetcher.ahead:
                yield self._plain(*pending.popleft())
        while pending:
            yield self._plain(*pending.popleft())

    def _plan(self, seed: int, position: int, global_batch_size: int) -> Iterator[tuple[EpochOrder, SampleRNG]]:
        while True:
            epoch, offset = divmod(position, len(self))
            rows, keys = self._sampler.order(seed, epoch)
            for start in range(offset, len(self), global_batch_size):
                part = slice(start, start + global_batch_size)
                yield EpochOrder(rows[part], keys[part]), SampleRNG(seed, epoch)
            position = (epoch + 1) * len(self)

    def _start(self, order: EpochOrder, rng: SampleRNG, micro_batch_size: int, shard: ReplicaShard) -> "_PendingStep":
        rows, keys = order
        plan = self._mixing.plan(len(rows), (rng.seed, rng.epoch, int(rows[0])))
        count = -(-len(rows) // micro_batch_size)
        micro_batches = []
        leaves = shard.leaves(count)
        for number, leaf in zip(shard.numbers(count), leaves, strict=True):
            first = number * micro_batch_size
            positions = np.arange(first, min(first + micro_batch_size, len(rows)))
            fetched = np.concatenate((positions, plan.partners(positions)))
            images = self._fetch(shard, rows[fetched], rng, keys[fetched])
            micro_batches.append(_PendingMicroBatch(number, leaf, positions, fetched, images))
        even = len(rows) % (micro_batch_size * shard.count) == 0
        return _PendingStep(rows, micro_batches, plan, count, even, leaves)

    def _fetch(self, shard: ReplicaShard, rows: Indices, rng: SampleRNG | None, keys: Indices) -> PendingPixels:
        """Start to fetch samples, normalized. A process without use for images reads none and gets zeros."""
        if not shard.needs_images and self._fetcher.can_skip_images:
            shape = (len(rows), self._transform.channels, self._transform.height, self._transform.width)
            zeros = torch.zeros((), device=self._device).expand(shape)
            return lambda: Fetched(zeros, np.arange(len(rows)))
        pending = self._fetcher.start(rows, rng, keys)

        def normalize() -> Fetched:
            pixels, kept, labels = pending()
            return Fetched(self._normalize(pixels), kept, labels)

        return normalize

    def _finish(self, step: "_PendingStep") -> StepBatch:
        started = time.perf_counter()
        batches = [self._mix(step, pending) for pending in step.micro_batches]
        self.waited_seconds += time.perf_counter() - started
        planned = sum(len(pending.positions) for pending in step.micro_batches)
        skipped = planned - sum(len(batch.labels) for batch in batches)
        readable = tuple(batch for batch in batches if len(batch.labels))
        return StepBatch(readable, len(step.rows), skipped, step.count, step.even, step.leaves)

    def _mix(self, step: "_PendingStep", pending: "_PendingMicroBatch") -> MicroBatch:
        """Finish one micro batch: its samples come first among the fetched ones, their mixing partners after them."""
        positions, fetched, place = pending.positions, pending.fetched, (pending.number, pending.leaf)
        images, kept, labels = pending.images()
        labels = self._labels_of(step.rows[fetched[kept]], labels)
        if len(kept) < len(fetched):  # one could not be read: train on this micro batch unmixed
            count = int((kept < len(positions)).sum())
            return MicroBatch(images[:count], labels[:count], int(positions[0]), None, *place)
        images, targets = step.plan.apply(images, labels, positions, fetched)
        return MicroBatch(images, labels[: len(positions)], int(positions[0]), targets, *place)

    def _plain(self, rows: Indices, fetch: PendingPixels) -> MicroBatch:
        images, kept, labels = fetch()
        return MicroBatch(images, self._labels_of(rows[kept], labels), 0)

    def _normalize(self, pixels: Tensor) -> Tensor:
        return copy_to(self._transform(copy_to(pixels, self._site)), self._device)

    def _labels_of(self, rows: Indices, known: Tensor | None) -> Tensor:
        if known is not None:
            return copy_to(known, self._device)
        return self._labels.index_select(0, copy_to(torch.from_numpy(rows), self._device))


@dataclass(frozen=True)
class _PendingMicroBatch:
    """Positions in the global batch of its samples, and of all that are fetched for it: samples, then partners."""

    number: int
    leaf: int
    positions: Indices
    fetched: Indices
    images: PendingPixels


@dataclass(frozen=True)
class _PendingStep:
    rows: Indices
    micro_batches: list[_PendingMicroBatch]
    plan: MixPlan
    count: int
    even: bool
    leaves: range
