"""Predictions of a model on the test images: logits, labels, and images of its most confident mistakes."""

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from convolve.report.calibration import Labels, Logits, softmax

Pixels = npt.NDArray[np.uint8]
MISTAKES = 24


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
    """Logits of one model for a whole test set; `subject` names the weights."""

    classes: tuple[str, ...]
    logits: Logits
    labels: Labels
    mistakes: tuple[Mistake, ...]
    subject: str

    @property
    def predictions(self) -> Labels:
        """Class with the largest logit of each image."""
        return np.asarray(self.logits.argmax(axis=1), np.int64)

    @property
    def accuracy(self) -> float:
        """Fraction of correct predictions."""
        return float((self.predictions == self.labels).mean())


class PredictionCollector:
    """Collects the logits of all batches and the images of the most confident mistakes."""

    def __init__(self, classes: tuple[str, ...], subject: str) -> None:
        self._classes, self._subject = classes, subject
        self._logits: list[Logits] = []
        self._labels: list[Labels] = []
        self._worst: list[Mistake] = []
        self._seen = 0

    def select(self, logits: Logits, labels: Labels) -> list[int]:
        """Return the rows of a batch whose images are needed: mistakes more confident than the least one collected."""
        probabilities = softmax(logits)
        wrong = np.flatnonzero(probabilities.argmax(axis=1) != labels)
        threshold = self._worst[0].probability if len(self._worst) >= MISTAKES else -1.0
        return [int(row) for row in wrong if probabilities[row].max() > threshold]

    def add(self, logits: Logits, labels: Labels, images: dict[int, Pixels]) -> None:
        """Add one batch, with the images of the rows that `select` returned."""
        probabilities = softmax(logits)
        for row, pixels in images.items():
            prediction = int(probabilities[row].argmax())
            probability = float(probabilities[row, prediction])
            mistake = Mistake(probability, self._seen + row, int(labels[row]), prediction, pixels)
            push = heapq.heappush if len(self._worst) < MISTAKES else heapq.heappushpop
            push(self._worst, mistake)
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
        )
