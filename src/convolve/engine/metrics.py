"""Counters that stay on the device: what a step adds to them costs no synchronisation."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from convolve.device import widest_float
from convolve.distributed.collectives import Alone, Team


@dataclass(frozen=True)
class Counts:
    """Loss and accuracy over a number of samples; NaN where nothing was counted."""

    loss: float
    accuracy: float
    samples: int


class Tally(Protocol):
    """Adds up what the micro batches report until somebody reads it."""

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count one micro batch; `loss` is the sum over its samples."""

    def read(self) -> Counts:
        """The counts since the last reading; waits for the device."""


class MetricTally:
    """Loss, correct answers and samples of all processes, summed in the widest format that the device has."""

    def __init__(self, device: torch.device, team: Team | None = None) -> None:
        self._sums = torch.zeros(2, dtype=widest_float(device), device=device)
        self._loss, self._correct = self._sums.unbind()
        self._samples = 0
        self._team = team or Alone()

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count one micro batch."""
        self._loss.add_(loss)
        self._correct.add_((logits.argmax(dim=1) == labels).sum())
        self._samples += len(labels)

    def read(self) -> Counts:
        """The counts since the last reading."""
        whole = torch.cat((self._sums, self._sums.new_tensor([self._samples])))
        loss, correct, count = self._team.add_stages(self._team.add_up(whole)).tolist()
        samples = int(count)
        self._sums.zero_()
        self._samples = 0
        if not samples:
            return Counts(math.nan, math.nan, 0)
        return Counts(loss / samples, correct / samples, samples)


class NullTally:
    """Counts nothing, for runs at full speed."""

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Let the micro batch pass."""

    def read(self) -> Counts:
        """Nothing was counted."""
        return Counts(math.nan, math.nan, 0)
