"""Counters that stay on the device: what a step adds to them costs no synchronization."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from convolve.device import accumulation_dtype
from convolve.distributed.collectives import Collectives, SingleProcess


@dataclass(frozen=True)
class EvalResult:
    """Loss and accuracy over a number of samples; NaN where nothing was counted."""

    loss: float
    accuracy: float
    samples: int


class Metrics(Protocol):
    """Adds up what the micro batches report until somebody reads it."""

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count one micro batch; `loss` is the sum over its samples."""

    def read(self) -> EvalResult:
        """The counts since the last reading; waits for the device."""


class RunningMetrics:
    """Loss, correct answers and samples of all processes, summed in the widest format that the device has."""

    def __init__(self, device: torch.device, team: Collectives | None = None) -> None:
        self._sums = torch.zeros(2, dtype=accumulation_dtype(device), device=device)
        self._loss, self._correct = self._sums.unbind()
        self._samples = 0
        self._team = team or SingleProcess()

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count one micro batch."""
        self._loss.add_(loss)
        self._correct.add_((logits.argmax(dim=1) == labels).sum())
        self._samples += len(labels)

    def read(self) -> EvalResult:
        """The counts since the last reading."""
        whole = torch.cat((self._sums, self._sums.new_tensor([self._samples])))
        loss, correct, count = self._team.sum_over_stages(self._team.sum_over_replicas(whole)).tolist()
        samples = int(count)
        self._sums.zero_()
        self._samples = 0
        if not samples:
            return EvalResult(math.nan, math.nan, 0)
        return EvalResult(loss / samples, correct / samples, samples)


class NullMetrics:
    """Counts nothing, for runs at full speed."""

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Let the micro batch pass."""

    def read(self) -> EvalResult:
        """Nothing was counted."""
        return EvalResult(math.nan, math.nan, 0)
