"""Running loss and accuracy. The sums stay on the device, so a step does not wait for it."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from convolve.device import accumulation_dtype
from convolve.distributed.collectives import Collectives, SingleProcess


@dataclass(frozen=True)
class EvalResult:
    """Mean loss, and accuracy in [0, 1], over a number of samples; NaN if there are none."""

    loss: float
    accuracy: float
    samples: int


class Metrics(Protocol):
    """Sums over micro batches."""

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add one micro batch; `loss` is the sum over its samples."""

    def compute(self) -> EvalResult:
        """Return the metrics since the last call and reset them. Waits for the device."""


class RunningMetrics:
    """Loss and correct predictions of all processes, summed in the widest format of the device."""

    def __init__(self, device: torch.device, collectives: Collectives | None = None) -> None:
        self._sums = torch.zeros(2, dtype=accumulation_dtype(device), device=device)
        self._loss, self._correct = self._sums.unbind()
        self._samples = 0
        self._collectives = collectives or SingleProcess()

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        self._loss.add_(loss)
        self._correct.add_((logits.argmax(dim=1) == labels).sum())
        self._samples += len(labels)

    def compute(self) -> EvalResult:
        sums = torch.cat((self._sums, self._sums.new_tensor([self._samples])))
        loss, correct, count = self._collectives.sum_over_stages(self._collectives.sum_over_replicas(sums)).tolist()
        samples = int(count)
        self._sums.zero_()
        self._samples = 0
        if not samples:
            return EvalResult(math.nan, math.nan, 0)
        return EvalResult(loss / samples, correct / samples, samples)


class NullMetrics:
    """Null object of `Metrics`, for runs at full speed."""

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        pass

    def compute(self) -> EvalResult:
        return EvalResult(math.nan, math.nan, 0)
