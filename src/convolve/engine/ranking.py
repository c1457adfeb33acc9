"""Scores of several labels per image in a validation, which need all logits at once.

Each process has the logits of some images. They are joined by a sum over processes: each adds its rows to a table of
zeros, so the joined logits have the same bits in any layout, and so have the scores, which do not depend on the order
of the images (`convolve.label_scores`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from convolve.distributed.collectives import Collectives
from convolve.engine.metrics import EvalResult
from convolve.label_scores import MEAN_AVERAGE_PRECISION, mean_average_precision, score_labels


class Ranking(Protocol):
    """Collects the logits of a validation."""

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add one batch."""

    def complete(self, result: EvalResult) -> EvalResult:
        """Return the result with what was found, on all processes."""


class NoRanking:
    """Null object for images with one class."""

    def update(self, logits: Tensor, labels: Tensor) -> None:
        pass

    def complete(self, result: EvalResult) -> EvalResult:
        return result


class LabelRanking:
    """Adds mean average precision and the scores of each label to a result; without thresholds, they are fitted."""

    def __init__(self, names: Sequence[str], thresholds: Sequence[float] | None, collectives: Collectives) -> None:
        self._names = tuple(names)
        self._thresholds = thresholds
        self._collectives = collectives
        self._rows: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self._rows.append(torch.cat((logits.float(), labels.float()), dim=1).cpu())

    def complete(self, result: EvalResult) -> EvalResult:
        found = self._join()
        if not len(found):
            return result
        logits, labels = found[:, : len(self._names)].numpy(), found[:, len(self._names) :].numpy() > 0.5
        scores = score_labels(logits, labels, self._names, self._thresholds)
        metrics = {MEAN_AVERAGE_PRECISION: mean_average_precision(scores), **result.metrics}
        return replace(result, metrics=metrics, labels=scores)

    def _join(self) -> Tensor:
        """Return the rows of all processes."""
        rows = torch.cat([torch.empty(0, 2 * len(self._names)), *self._rows])
        topology = self._collectives.topology
        counts = torch.zeros(topology.replicas, dtype=torch.float64)
        counts[topology.replica] = len(rows)
        totals = self._sum(counts).long()
        first = int(totals[: topology.replica].sum())
        table = torch.zeros(int(totals.sum()), rows.shape[1])
        table[first : first + len(rows)] = rows
        return self._sum(table)

    def _sum(self, values: Tensor) -> Tensor:
        return self._collectives.sum_over_stages(self._collectives.sum_over_replicas(values))
