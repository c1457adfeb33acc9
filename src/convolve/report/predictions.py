"""Predictions of a model on the test images, with its most confident mistakes, and the confusion matrix."""

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from convolve.report.calibration import Labels, Logits, softmax

Pixels = npt.NDArray[np.uint8]
MISTAKES = 24
EXAMPLES = 6
_MAX_EXAMPLES = 240


@dataclass(frozen=True, order=True)
class Mistake:
    """A wrong prediction with its probability; `index` is the position of the image in the test set."""

    probability: float
    index: int
    truth: int = field(compare=False)
    prediction: int = field(compare=False)
    pixels: Pixels = field(compare=False, repr=False)


@dataclass(frozen=True)
class TestPredictions:
    """Logits of one model for a whole test set; `subject` names the weights.

    `mistakes` are the most confident ones, `examples` those of each pair of truth and prediction.
    """

    classes: tuple[str, ...]
    logits: Logits
    labels: Labels
    mistakes: tuple[Mistake, ...]
    subject: str
    examples: Mapping[tuple[int, int], tuple[Mistake, ...]] = field(default_factory=dict)

    @property
    def predictions(self) -> Labels:
        """Class with the largest logit of each image."""
        return np.asarray(self.logits.argmax(axis=1), np.int64)

    @property
    def accuracy(self) -> float:
        """Fraction of correct predictions."""
        return float((self.predictions == self.labels).mean())


class _Examples:
    """The most confident mistakes of each pair of truth and prediction.

    Memory is bounded: if too many images are held, the pairs that occur least often lose theirs.
    """

    def __init__(self) -> None:
        self._heaps: dict[tuple[int, int], list[Mistake]] = {}
        self._counts: Counter[tuple[int, int]] = Counter()

    def needs(self, pair: tuple[int, int], probability: float) -> bool:
        heap = self._heaps.get(pair, [])
        return len(heap) < EXAMPLES or probability > heap[0].probability

    def count(self, pair: tuple[int, int]) -> None:
        self._counts[pair] += 1

    def add(self, mistake: Mistake) -> None:
        heap = self._heaps.setdefault((mistake.truth, mistake.prediction), [])
        push = heapq.heappush if len(heap) < EXAMPLES else heapq.heappushpop
        push(heap, mistake)
        while sum(map(len, self._heaps.values())) > _MAX_EXAMPLES:
            del self._heaps[min(self._heaps, key=lambda pair: self._counts[pair])]

    def result(self) -> dict[tuple[int, int], tuple[Mistake, ...]]:
        return {pair: tuple(sorted(heap, reverse=True)) for pair, heap in self._heaps.items()}


class PredictionCollector:
    """Collects the logits of all batches and the images of the most confident mistakes."""

    def __init__(self, classes: tuple[str, ...], subject: str) -> None:
        self._classes, self._subject = classes, subject
        self._logits: list[Logits] = []
        self._labels: list[Labels] = []
        self._worst: list[Mistake] = []
        self._examples = _Examples()
        self._seen = 0

    def select(self, logits: Logits, labels: Labels) -> list[int]:
        """Return the rows of a batch whose images are needed: mistakes more confident than those collected."""
        probabilities = softmax(logits)
        wrong = np.flatnonzero(probabilities.argmax(axis=1) != labels)
        threshold = self._worst[0].probability if len(self._worst) >= MISTAKES else -1.0
        rows = []
        for row in map(int, wrong):
            prediction, probability = int(probabilities[row].argmax()), float(probabilities[row].max())
            if probability > threshold or self._examples.needs((int(labels[row]), prediction), probability):
                rows.append(row)
        return rows

    def add(self, logits: Logits, labels: Labels, images: dict[int, Pixels]) -> None:
        """Add one batch, with the images of the rows that `select` returned."""
        probabilities = softmax(logits)
        for truth, prediction in zip(labels, probabilities.argmax(axis=1), strict=True):
            self._examples.count((int(truth), int(prediction)))
        for row, pixels in images.items():
            prediction = int(probabilities[row].argmax())
            probability = float(probabilities[row, prediction])
            mistake = Mistake(probability, self._seen + row, int(labels[row]), prediction, pixels)
            push = heapq.heappush if len(self._worst) < MISTAKES else heapq.heappushpop
            push(self._worst, mistake)
            self._examples.add(mistake)
        self._logits.append(logits)
        self._labels.append(labels)
        self._seen += len(labels)

    def result(self) -> TestPredictions:
        """Return everything that was added."""
        return TestPredictions(
            self._classes,
            np.concatenate(self._logits),
            np.concatenate(self._labels),
            tuple(sorted(self._worst, reverse=True)),
            self._subject,
            self._examples.result(),
        )


Counts = npt.NDArray[np.int64]
Classes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ClassScore:
    """Scores of one class, in [0, 1]; zero if the denominator is zero."""

    name: str
    images: int
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class Confusion:
    """Number of images of one class that are predicted as another."""

    truth: str
    prediction: str
    images: int


def count_confusions(predictions: Classes, labels: Classes, classes: int) -> Counts:
    """Return the matrix [truth, prediction] of image counts."""
    return np.bincount(labels * classes + predictions, minlength=classes * classes).reshape(classes, classes)


def score_classes(matrix: Counts, names: tuple[str, ...]) -> list[ClassScore]:
    """Return precision, recall and F1 of each class, in label order."""
    correct = np.diag(matrix).astype(np.float64)
    truths, predictions = matrix.sum(axis=1), matrix.sum(axis=0)
    precision, recall = correct / np.maximum(predictions, 1), correct / np.maximum(truths, 1)
    f1 = 2 * correct / np.maximum(truths + predictions, 1)
    return [
        ClassScore(name, int(truths[i]), float(precision[i]), float(recall[i]), float(f1[i]))
        for i, name in enumerate(names)
    ]


def worst_confusions(matrix: Counts, names: tuple[str, ...], limit: int) -> list[Confusion]:
    """Return the most frequent confusions, most frequent first."""
    wrong = matrix - np.diag(np.diag(matrix))
    order = np.argsort(-wrong, axis=None, kind="stable")[:limit]
    pairs = [divmod(int(cell), len(names)) for cell in order]
    return [Confusion(names[t], names[p], int(wrong[t, p])) for t, p in pairs if wrong[t, p]]
