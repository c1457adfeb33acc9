"""Scores of a model with several labels per image: average precision, thresholds, precision, recall and F1.

The arithmetic, for one label with P positive images. Order the images by descending score; images of equal score are
taken together, so their order does not matter. With precision and recall of the images down to each distinct score,

    average precision = sum over distinct scores of (recall - recall before) x precision

The mean average precision is the mean over the labels that have a positive image. Without a positive image, a label has
no average precision, and its threshold is 0.5.

A label is predicted if its probability p = 1 / (1 + exp(-logit)) is at least its threshold. The threshold is the one
with the highest F1 = 2 true positives / (positives + predicted), halfway between the lowest probability that it accepts
and the highest that it rejects (0 if it rejects none). Among several, it is the highest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MEAN_AVERAGE_PRECISION = "mean_average_precision"
DEFAULT_THRESHOLD = 0.5

Logits = npt.NDArray[np.float32]
Truth = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LabelScore:
    """Scores of one label, in [0, 1]. `images` is the number of positive ones; `average_precision` is None without any.

    Precision, recall and F1 are those at `threshold`; zero if the denominator is zero.
    """

    label: str
    images: int
    average_precision: float | None
    threshold: float
    precision: float
    recall: float
    f1: float


def sigmoid(logits: Logits) -> Logits:
    """Return 1 / (1 + exp(-logit)) in float32, without overflow."""
    powers = np.exp(-np.abs(logits.astype(np.float32)))
    return np.where(logits >= 0, 1 / (1 + powers), powers / (1 + powers)).astype(np.float32)


def average_precision(scores: npt.NDArray[np.floating], truth: Truth) -> float | None:
    """Return the average precision of one label; None if no image has it."""
    if not truth.any():
        return None
    found, taken, _ = _count_down(scores, truth)
    gained = np.diff(found, prepend=0)
    return float((gained * (found / taken)).sum() / found[-1])


def fit_threshold(probabilities: Logits, truth: Truth) -> float:
    """Return the threshold of one label with the highest F1."""
    if not truth.any():
        return DEFAULT_THRESHOLD
    found, taken, lowest = _count_down(probabilities, truth)
    best = int(np.argmax(2 * found / (taken + found[-1])))
    rejected = lowest[best + 1] if best + 1 < len(lowest) else 0.0
    return float((lowest[best] + rejected) / 2)


def _count_down(
    scores: npt.NDArray[np.floating], truth: Truth
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return for each distinct score, highest first: positive images and all images down to it, and the score."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order].astype(np.float64)
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
    return np.cumsum(truth[order], dtype=np.int64)[last], (last + 1).astype(np.int64), ranked[last]


def score_labels(
    logits: Logits, truth: Truth, names: Sequence[str], thresholds: Sequence[float] | None = None
) -> tuple[LabelScore, ...]:
    """Return the scores of each label for logits and truth [N, labels]; without thresholds, they are fitted first."""
    probabilities = sigmoid(logits)
    scores = []
    for number, name in enumerate(names):
        column, positive = probabilities[:, number], truth[:, number]
        threshold = fit_threshold(column, positive) if thresholds is None else thresholds[number]
        predicted = column >= threshold
        hits, images, accepted = int((predicted & positive).sum()), int(positive.sum()), int(predicted.sum())
        precision, recall = hits / max(accepted, 1), hits / max(images, 1)
        f1 = 2 * hits / max(images + accepted, 1)
        ranked = average_precision(logits[:, number], positive)
        scores.append(LabelScore(name, images, ranked, threshold, precision, recall, f1))
    return tuple(scores)


def mean_average_precision(scores: Sequence[LabelScore]) -> float:
    """Return the mean over the labels that have an average precision; NaN if none has."""
    found = [score.average_precision for score in scores if score.average_precision is not None]
    return float(np.mean(found)) if found else float("nan")
