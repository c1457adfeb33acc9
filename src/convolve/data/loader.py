"""Batches from a split that lives in memory: one gather and one conversion per micro batch.

A position in training is one integer, the number of samples seen. A window is what one step consumes: up to a global
batch of consecutive samples of the epoch's order, never across the end of an epoch, so the last window of an epoch may
be short.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from convolve.data.dataset import Split
from convolve.data.order import epoch_order
from convolve.data.transform import Transform


@dataclass(frozen=True)
class Batch:
    """One micro batch; `first` is the position of its first sample inside the window."""

    images: Tensor
    labels: Tensor
    first: int


@dataclass(frozen=True)
class Window:
    """All micro batches of one step, and the true number of their samples."""

    batches: tuple[Batch, ...]
    samples: int


class MemoryLoader:
    """Batches of a split in memory, in training order or in storage order."""

    def __init__(self, split: Split, transform: Transform, device: torch.device) -> None:
        self._images = torch.from_numpy(split.images).to(device)
        self._labels = torch.from_numpy(split.labels).to(device)
        self._transform = transform
        self._device = device
        self.waited_seconds = 0.0

    def __len__(self) -> int:
        return len(self._labels)

    def _batch(self, rows: Tensor, first: int) -> Batch:
        images = self._transform(self._images.index_select(0, rows))
        return Batch(images, self._labels.index_select(0, rows), first)

    def _window(self, rows: Tensor, micro_batch_size: int) -> Window:
        started = time.perf_counter()
        parts = torch.split(rows, micro_batch_size)
        batches = tuple(self._batch(part, index * micro_batch_size) for index, part in enumerate(parts))
        self.waited_seconds += time.perf_counter() - started
        return Window(batches, len(rows))

    def windows(self, seed: int, position: int, sizes: tuple[int, int]) -> Iterator[Window]:
        """Windows from a position on, for ever; `sizes` are the micro batch and the global batch."""
        micro_batch_size, global_batch_size = sizes
        while True:
            epoch, offset = divmod(position, len(self))
            order = torch.from_numpy(epoch_order(seed, epoch, len(self))).to(self._device)
            for rows in torch.split(order[offset:], global_batch_size):
                yield self._window(rows, micro_batch_size)
                position += len(rows)

    def batches(self, size: int) -> Iterator[Batch]:
        """Every sample once, in storage order."""
        for rows in torch.split(torch.arange(len(self), device=self._device), size):
            yield self._batch(rows, 0)
