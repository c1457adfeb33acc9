"""The user's loss and metrics, and what a run minimizes and reports.

The arithmetic: a loss returns one value per sample. Its sum over a micro batch is divided by the number of samples of
the global batch, as for cross-entropy. A mixed sample has several labels with weights w_k that sum to one; its loss is
sum_k w_k loss(outputs, labels_k). A loss that returns one number is taken as the mean over its samples. A metric
returns sums, which are added over micro batches and processes; `compute` turns the totals into one number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from convolve.data.dataset import Targets, Task
from convolve.device import accumulation_dtype
from convolve.distributed.collectives import Collectives
from convolve.engine.metrics import CorrectFn, CrossEntropy, LossFn, MetricSums, has_class
from convolve.engine.ranking import LabelRanking, NoRanking, Ranking
from convolve.errors import ConfigError, to_one_line
from convolve.label_scores import MEAN_AVERAGE_PRECISION


class Loss(Protocol):
    """A loss: one value per sample."""

    def __call__(self, outputs: Tensor, targets: Tensor, /) -> Tensor:
        """Return the losses [N] of outputs [N, classes] and labels [N], or [N, classes] if targets are vectors."""


@runtime_checkable
class Metric(Protocol):
    """A metric as sums over samples, which are added over batches and processes."""

    @property
    def name(self) -> str:
        """Name of the column in tables and records."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger value is better."""

    def update(self, outputs: Tensor, targets: Tensor, /) -> Tensor:
        """Return sums over these samples as a vector, always of the same length."""

    def compute(self, sums: Tensor, /) -> float:
        """Return the metric of the total sums."""


@dataclass(frozen=True)
class MeanMetric:
    """The mean of one value per sample."""

    name: str
    values: Callable[[Tensor, Tensor], Tensor]
    higher_is_better: bool = True

    def update(self, outputs: Tensor, targets: Tensor, /) -> Tensor:
        values = self.values(outputs, targets)
        if values.shape != targets.shape[:1]:
            raise ConfigError(
                f"metric {self.name}: returned shape {tuple(values.shape)} for {len(targets)} samples; "
                "return one value per sample, or use a class with update and compute"
            )
        values = values.to(accumulation_dtype(values.device))
        return torch.stack((values.sum(), values.new_tensor(len(targets))))

    def compute(self, sums: Tensor, /) -> float:
        return float(sums[0] / sums[1])


def _in_top5(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.ndim > 1:
        raise ConfigError("metric top5_accuracy: needs one class per image; omit it")
    return (outputs.topk(min(5, outputs.shape[1])).indices == targets[:, None]).any(dim=1)


BUILT_IN_METRICS = {"top5_accuracy": MeanMetric("top5_accuracy", _in_top5)}
"""Metrics by name, besides loss and accuracy."""


class UserLoss:
    """The user's loss as the sum over a micro batch, with mixed targets."""

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.name = name_of(loss)

    def __call__(self, logits: Tensor, targets: Targets | Tensor) -> Tensor:
        if isinstance(targets, Tensor):
            return self._sum(logits, targets)
        if targets.weights is None:
            return self._sum(logits, targets.labels)
        parts = [
            (self._values(logits, labels) * weights.to(logits.dtype)).sum()
            for labels, weights in zip(targets.labels, targets.weights, strict=True)
        ]
        return torch.stack(parts).sum()

    def _sum(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self._values(logits, labels).sum()

    def _values(self, logits: Tensor, labels: Tensor) -> Tensor:
        values = self._loss(logits, labels)
        if values.ndim == 0:
            return values.expand(len(labels))
        if values.shape != labels.shape[:1]:
            raise ConfigError(
                f"loss {self.name}: returned shape {tuple(values.shape)} for {len(labels)} samples; "
                "return one value per sample"
            )
        return values


class UserMetrics(MetricSums):
    """The sums of several metrics in one vector."""

    def __init__(self, metrics: Sequence[Metric], sizes: Sequence[int]) -> None:
        self._metrics = tuple(metrics)
        self._sizes = list(sizes)
        self.size = sum(sizes)
        self.names = tuple(metric.name for metric in metrics)

    def update(self, logits: Tensor, labels: Tensor) -> Tensor:
        wide = accumulation_dtype(logits.device)
        return torch.cat([metric.update(logits, labels).reshape(-1).to(wide) for metric in self._metrics])

    def compute(self, sums: Tensor) -> dict[str, float]:
        parts = torch.split(sums, self._sizes)
        return {metric.name: float(metric.compute(part)) for metric, part in zip(self._metrics, parts, strict=True)}


@dataclass(frozen=True)
class Objective:
    """What a run minimizes and reports. Validation uses `valid_loss`, which has no label smoothing.

    `correct` decides whether a prediction counts as correct. `labels` are the names of several labels per image.
    """

    loss: LossFn = field(default_factory=CrossEntropy)
    valid_loss: LossFn = field(default_factory=CrossEntropy)
    metrics: MetricSums = field(default_factory=MetricSums)
    correct: CorrectFn = has_class
    labels: tuple[str, ...] = ()

    def open_ranking(self, thresholds: Sequence[float] | None, collectives: Collectives) -> Ranking:
        """Return what collects logits in a validation; nothing unless images have several labels."""
        return LabelRanking(self.labels, thresholds, collectives) if self.labels else NoRanking()


def name_of(item: object) -> str:
    """Return the name of a function, class or object of the user."""
    return str(getattr(item, "__qualname__", None) or type(item).__qualname__)


def example_targets(classes: int, task: Task) -> Tensor:
    """Return targets of two samples, to try a loss or metric: class numbers [2], or vectors [2, classes]."""
    if task == "single-label":
        return torch.zeros(2, dtype=torch.int64)
    return torch.nn.functional.one_hot(torch.zeros(2, dtype=torch.int64), classes).float()


def require_loss(stored: object, given: Loss | None) -> None:
    """Reject the resumption of a run without the loss of the user's code that its checkpoint names."""
    if isinstance(stored, str) and given is None:
        raise ConfigError(
            f"loss {to_one_line(stored)[:60]}: the run was trained with your loss; give it again with --loss"
        )


def check_loss(loss: Loss, classes: int, task: Task = "single-label") -> None:
    """Reject a loss with parameters or with a wrong signature before training."""
    name = name_of(loss)
    if isinstance(loss, nn.Module) and next(loss.parameters(), None) is not None:
        raise ConfigError(f"loss {name}: has parameters, which would not be trained; move them into the model")
    targets = example_targets(classes, task)
    with torch.random.fork_rng(devices=[]):
        try:
            values = UserLoss(loss)(torch.zeros(2, classes), targets)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"loss {name}: failed for outputs [2, {classes}] and labels {[*targets.shape]} ({_describe(error)}); "
                "write loss(outputs, targets) -> one value per sample"
            ) from error
    if not isinstance(values, Tensor):
        raise ConfigError(f"loss {name}: returned {type(values).__name__}; return a tensor with one value per sample")


def measure_metrics(metrics: Sequence[Metric], classes: int, task: Task = "single-label") -> MetricSums:
    """Return the sums of metrics; the length of each one's sums is found by a call with two samples."""
    if not metrics:
        return MetricSums()
    outputs, labels = torch.zeros(2, classes), example_targets(classes, task)
    sizes = []
    for metric in metrics:
        if metric.name == MEAN_AVERAGE_PRECISION:
            raise ConfigError(f"metric {metric.name}: is built in; give yours another name")
        try:
            sums = metric.update(outputs, labels)
            metric.compute(sums.reshape(-1).double())
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"metric {metric.name}: failed for outputs [2, {classes}] and labels {[*labels.shape]} "
                f"({_describe(error)}); "
                "write update(outputs, targets) -> sums and compute(sums) -> float"
            ) from error
        sizes.append(sums.numel())
    return UserMetrics(metrics, sizes)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {to_one_line(str(error).partition(chr(10))[0])}"
