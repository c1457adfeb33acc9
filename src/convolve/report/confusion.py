"""Confusion matrix, and precision, recall and F1 of each class."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
