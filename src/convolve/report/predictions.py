"""What a network answered on the test images: logits, labels, and its most confident mistakes as pictures."""

import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from convolve.report.calibration import Labels, Logits, softmax

Pixels = npt.NDArray[np.uint8]
MISTAKES = 24


@dataclass(frozen=True, order=True)
class Mistake:
    """A wrong answer with its probability; `index` is the image's place in the test set."""

    probability: float
    index: int
    truth: int = field(compare=False)
    answer: int = field(compare=False)
    pixels: Pixels = field(compare=False, repr=False)


@dataclass(frozen=True)
class TestPredictions:
    """The outputs of one network on a whole test set."""

    classes: tuple[str, ...]
    logits: Logits
    labels: Labels
    mistakes: tuple[Mistake, ...]
    what: str

    @property
    def answers(self) -> Labels:
        """The class with the largest logit, for each image."""
        return np.asarray(self.logits.argmax(axis=1), np.int64)

    @property
    def accuracy(self) -> float:
        """Share of 1 of right answers."""
        return float((self.answers == self.labels).mean())


class PredictionCollector:
    """Takes batches of outputs and keeps what a report needs; of the images only the worst mistakes."""

    def __init__(self, classes: tuple[str, ...], what: str) -> None:
        self._classes, self._what = classes, what
        self._logits: list[Logits] = []
        self._labels: list[Labels] = []
        self._worst: list[Mistake] = []
        self._seen = 0

    def wanted(self, logits: Logits, labels: Labels) -> list[int]:
        """Rows of a batch whose pictures are needed: wrong, and more confident than the worst kept so far."""
        shares = softmax(logits)
        wrong = np.flatnonzero(shares.argmax(axis=1) != labels)
        least = self._worst[0].probability if len(self._worst) >= MISTAKES else -1.0
        return [int(row) for row in wrong if shares[row].max() > least]

    def add(self, logits: Logits, labels: Labels, pictures: dict[int, Pixels]) -> None:
        """Take one batch, with the pictures of the rows that were wanted."""
        shares = softmax(logits)
        for row, pixels in pictures.items():
            answer = int(shares[row].argmax())
            mistake = Mistake(float(shares[row, answer]), self._seen + row, int(labels[row]), answer, pixels)
            push = heapq.heappush if len(self._worst) < MISTAKES else heapq.heappushpop
            push(self._worst, mistake)
        self._logits.append(logits)
        self._labels.append(labels)
        self._seen += len(labels)

    def evidence(self) -> TestPredictions:
        """Everything that was taken."""
        return TestPredictions(
            self._classes,
            np.concatenate(self._logits),
            np.concatenate(self._labels),
            tuple(sorted(self._worst, reverse=True)),
            self._what,
        )
