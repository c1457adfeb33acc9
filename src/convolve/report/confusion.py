"""Which classes are taken for which: the confusion matrix, and precision, recall and F1 of each class."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Classes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ClassScore:
    """How well one class is found; shares of 1, zero where there is nothing to divide by."""

    name: str
    images: int
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class Confusion:
    """One pair of classes that is mixed up, and how often."""

    truth: str
    answer: str
    images: int


def count_confusions(answers: Classes, labels: Classes, classes: int) -> Counts:
    """The matrix [truth, answer] of image counts."""
    return np.bincount(labels * classes + answers, minlength=classes * classes).reshape(classes, classes)


def score_classes(matrix: Counts, names: tuple[str, ...]) -> list[ClassScore]:
    """Precision, recall and F1 of each class, in label order."""
    right = np.diag(matrix).astype(np.float64)
    truths, answers = matrix.sum(axis=1), matrix.sum(axis=0)
    precision, recall = right / np.maximum(answers, 1), right / np.maximum(truths, 1)
    f1 = 2 * right / np.maximum(truths + answers, 1)
    return [
        ClassScore(name, int(truths[i]), float(precision[i]), float(recall[i]), float(f1[i]))
        for i, name in enumerate(names)
    ]


def worst_confusions(matrix: Counts, names: tuple[str, ...], limit: int) -> list[Confusion]:
    """The pairs that are mixed up most often, the worst first."""
    wrong = matrix - np.diag(np.diag(matrix))
    order = np.argsort(-wrong, axis=None, kind="stable")[:limit]
    pairs = [divmod(int(place), len(names)) for place in order]
    return [Confusion(names[t], names[a], int(wrong[t, a])) for t, a in pairs if wrong[t, a]]
