"""Losses of a micro batch, and running loss and accuracy.

The loss is a sum over samples; the caller divides by the size of the global batch. Label smoothing: `all` gives (1 - e)
to the target and spreads e over all K classes; `others` spreads e over the K - 1 other classes, which is the same with
e K / (K - 1). A mixed sample has several labels with weights that sum to one; its loss is the weighted sum of the
losses of the labels. A soft label is a probability q_c of each class c; its loss is -sum_c q_c log p_c. Several labels
per image: the mean over labels of the binary cross-entropy -t log p - (1 - t) log(1 - p), p = 1 / (1 + exp(-logit)).
Class weights multiply the loss of each label; the sum is still divided by the number of samples,
so micro batches and replicas do not change the result (torch divides by the sum of the weights of a batch). Running
sums stay on the device, so a step does not wait for it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from convolve.data.dataset import Targets
from convolve.device import accumulation_dtype
from convolve.distributed.collectives import Collectives, SingleProcess
from convolve.label_scores import MEAN_AVERAGE_PRECISION, LabelScore


class LossFn(Protocol):
    """Sum of the losses of a micro batch; plain labels are targets of weight one."""

    def __call__(self, logits: Tensor, targets: Targets | Tensor) -> Tensor: ...


class BinaryCrossEntropy:
    """Binary cross-entropy of several labels per image, as the mean over labels; targets [N, labels] in [0, 1]."""

    def __call__(self, logits: Tensor, targets: Targets | Tensor) -> Tensor:
        dense = targets if isinstance(targets, Tensor) else targets.labels
        total = functional.binary_cross_entropy_with_logits(logits, dense.to(logits.dtype), reduction="sum")
        return total / logits.shape[1]


class CrossEntropy:
    """Softmax cross-entropy with label smoothing, mixed targets and soft labels."""

    def __init__(
        self, label_smoothing: float = 0.0, over: Literal["all", "others"] = "all", class_weights: Tensor | None = None
    ) -> None:
        self._smoothing = label_smoothing
        self._over = over
        self._class_weights = class_weights

    def __call__(self, logits: Tensor, targets: Targets | Tensor) -> Tensor:
        """Return the sum of the losses of a micro batch; plain labels are targets of weight one."""
        classes = logits.shape[1]
        factor = classes / max(classes - 1, 1) if self._over == "others" else 1.0
        smoothing = min(self._smoothing * factor, 1.0)
        if self._class_weights is not None:
            return self._weighted(logits, targets, smoothing, self._class_weights.to(logits.device))
        if isinstance(targets, Tensor) or targets.weights is None:
            labels = targets if isinstance(targets, Tensor) else targets.labels
            labels = labels.to(logits.dtype) if labels.ndim == 2 else labels
            return functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        log_probs = logits.log_softmax(dim=1)
        weighted = log_probs.gather(1, targets.labels.T).mul(targets.weights.T.to(log_probs.dtype)).sum()
        if not smoothing:
            return -weighted
        return -(1 - smoothing) * weighted - smoothing * log_probs.mean(dim=1).sum()

    def _weighted(self, logits: Tensor, targets: Targets | Tensor, smoothing: float, by_class: Tensor) -> Tensor:
        labels = targets if isinstance(targets, Tensor) else targets.labels
        mixed = None if isinstance(targets, Tensor) else targets.weights
        labels = labels[None] if mixed is None else labels
        weights = by_class[labels] if mixed is None else by_class[labels] * mixed
        log_probs = logits.log_softmax(dim=1)
        weights = weights.T.to(log_probs.dtype)
        plain = log_probs.gather(1, labels.T).mul(weights).sum()
        if not smoothing:
            return -plain
        return -(1 - smoothing) * plain - smoothing * (log_probs.mean(dim=1) * weights.sum(dim=1)).sum()


def has_class(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether the likeliest class of each sample is its label [N]."""
    return logits.argmax(dim=1) == labels


def has_likeliest_class(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether the likeliest class of each sample is that of its soft label [N, classes]."""
    return logits.argmax(dim=1) == labels.argmax(dim=1)


def has_all_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Return whether all labels [N, labels] of each sample are right at a probability of one half."""
    return ((logits > 0) == (labels > 0.5)).all(dim=1)


CorrectFn = Callable[[Tensor, Tensor], Tensor]
"""Whether each sample is predicted correctly, from logits and labels."""


@dataclass(frozen=True)
class EvalResult:
    """Mean loss, accuracy in [0, 1] and metrics over a number of samples; NaN if there are none.

    `labels` are the scores of each label, if images have several.
    """

    loss: float
    accuracy: float
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    labels: tuple[LabelScore, ...] = ()

    @property
    def score(self) -> float:
        """What selects the best checkpoint: mean average precision if images have several labels, else accuracy."""
        return self.metrics.get(MEAN_AVERAGE_PRECISION, self.accuracy)

    def to_json(self) -> dict[str, Any]:
        """Return the figures for a checkpoint."""
        return {**self.metrics, "loss": self.loss, "accuracy": self.accuracy, "samples": self.samples}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "EvalResult":
        """Return the result of stored figures; raises KeyError, TypeError, ValueError or OverflowError otherwise."""
        named = {name: float(value) for name, value in stored.items() if name not in ("loss", "accuracy", "samples")}
        return cls(float(stored["loss"]), float(stored["accuracy"]), int(stored["samples"]), named)


class MetricSums:
    """Sums of the user's metrics, as one vector of `size` numbers; here none. Subclassed by `objective.UserMetrics`."""

    size = 0
    names: tuple[str, ...] = ()

    def update(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sums over a micro batch."""
        return logits.new_empty(0)

    def compute(self, sums: Tensor) -> dict[str, float]:
        """Return each metric of the total sums, by name."""
        return {}


class Metrics(Protocol):
    """Sums over micro batches."""

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add one micro batch; `loss` is the sum over its samples."""

    def compute(self) -> EvalResult:
        """Return the metrics since the last call and reset them. Waits for the device."""


class RunningMetrics:
    """Loss, correct predictions and the user's metrics of all processes, summed in the widest format of the device."""

    def __init__(
        self,
        device: torch.device,
        collectives: Collectives | None = None,
        metrics: MetricSums | None = None,
        correct: CorrectFn = has_class,
    ) -> None:
        self._is_correct = correct
        self._metrics = metrics or MetricSums()
        self._sums = torch.zeros(2 + self._metrics.size, dtype=accumulation_dtype(device), device=device)
        self._loss, self._correct = self._sums[:2].unbind()
        self._extra = self._sums[2:]
        self._samples = 0
        self._collectives = collectives or SingleProcess()

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        self._loss.add_(loss)
        self._correct.add_(self._is_correct(logits, labels).sum())
        if self._metrics.size:
            self._extra.add_(self._metrics.update(logits, labels))
        self._samples += len(labels)

    def compute(self) -> EvalResult:
        sums = torch.cat((self._sums, self._sums.new_tensor([self._samples])))
        totals = self._collectives.sum_over_stages(self._collectives.sum_over_replicas(sums)).cpu()
        loss, correct, *_, count = totals.tolist()
        samples = int(count)
        self._sums.zero_()
        self._samples = 0
        if not samples:
            return EvalResult(math.nan, math.nan, 0)
        return EvalResult(loss / samples, correct / samples, samples, self._metrics.compute(totals[2:-1]))


class NullMetrics:
    """Null object of `Metrics`, for runs at full speed."""

    def update(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        pass

    def compute(self) -> EvalResult:
        return EvalResult(math.nan, math.nan, 0)
