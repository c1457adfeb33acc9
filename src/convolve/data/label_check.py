"""Find labels that are probably wrong, by the features of a model.

The arithmetic: images are divided into five folds, stratified by class, duplicates together. With x the standardized
features of an image divided by the square root of their number, and a one, ridge regression of the one-hot labels is
fitted to the images outside a fold,

    W = (X'X + strength mean(diag X'X) I)^-1 X'T        or X' (XX' + ...)^-1 T, whichever is smaller,

and predicts scores s = W'x for the fold. Probabilities are p = softmax(k s). Strength and k are those of a few with the
lowest cross-entropy of the labels as given. With t_j the mean of p_j over the images labeled j, an image labeled i is
suspicious if its likeliest class j is another one, p_j >= max(0.7 t_j, 1/2) and p_i <= 0.1 t_i, a form of confident
learning (Northcutt et al. 2021).

Classes with fewer than five images cannot be judged, and their images are never suspicious.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from convolve.data.dataset import Labels
from convolve.data.readers.splits import assign_folds
from convolve.download import Progress, ignore_progress
from convolve.rng import Indices

FeatureArray = npt.NDArray[np.float32]
FOLDS = 5
LEAST_IMAGES = 5
STRENGTHS = (0.3, 1.0, 3.0)
SHARPNESS = tuple(2.0 ** (step / 2) for step in range(14))
_OTHER, _OWN = 0.7, 0.1
_MIN_STD = 1e-3


@dataclass(frozen=True)
class Suspect:
    """An image whose label is probably wrong: its row, the likelier class, and the probability of that class."""

    row: int
    suggestion: int
    probability: float


def find_suspects(
    features: FeatureArray, labels: Labels, groups: Indices, progress: Progress = ignore_progress
) -> list[Suspect]:
    """Return the suspicious images, the most likely errors first. Rows of features with NaN are ignored."""
    rows = np.flatnonzero(np.isfinite(features).all(1))
    if len(rows) < 2 * FOLDS or len(np.unique(labels[rows])) < 2:
        return []
    known, numbers = np.unique(labels[rows], return_inverse=True)
    judged = features if len(rows) == len(features) else features[rows]
    probabilities = predict_held_out(judged, numbers, _renumber(groups[rows]), progress)
    found = _judge(probabilities, numbers)
    return [Suspect(int(rows[one.row]), int(known[one.suggestion]), one.probability) for one in found]


def _renumber(groups: Indices) -> Indices:
    """Return groups as the position of their first member."""
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    return first[inverse]


def predict_held_out(
    features: FeatureArray, labels: Labels, groups: Indices, progress: Progress = ignore_progress
) -> npt.NDArray[np.float32]:
    """Return the probabilities [N, classes] of each image under a classifier that was fitted without it."""
    keys = [row.to_bytes(8, "big") for row in range(len(labels))]
    folds = torch.from_numpy(assign_folds(labels, keys, groups, FOLDS))
    values, targets = _scale(features), torch.from_numpy(labels)
    ones = functional.one_hot(targets).float()
    scores = torch.zeros(len(STRENGTHS), *ones.shape)
    fit = _fit_dual if len(values) <= values.shape[1] else _fit_primal
    for fold in range(FOLDS):
        progress("check labels", fold, FOLDS)
        held = folds == fold
        scores[:, held] = fit(values[~held], ones[~held], values[held])
    progress("check labels", FOLDS, FOLDS)
    losses = [(float(functional.cross_entropy(part * k, targets)), k, part) for part in scores for k in SHARPNESS]
    _, sharpness, best = min(losses, key=lambda item: item[0])
    result: npt.NDArray[np.float32] = functional.softmax(best * sharpness, 1).numpy()
    return result


def _scale(features: FeatureArray) -> Tensor:
    """Return standardized features with a column of ones; they are large, so there is one copy of them."""
    given = torch.from_numpy(features)
    scaled = torch.ones(len(given), given.shape[1] + 1)
    values = scaled[:, :-1]
    torch.sub(given, given.mean(0), out=values)
    values.div_(given.std(0, correction=0).clamp_min(_MIN_STD)).div_(given.shape[1] ** 0.5)
    return scaled


def _fit_primal(values: Tensor, targets: Tensor, held: Tensor) -> Tensor:
    """Return the scores of held-out images for each strength."""
    gram, cross = values.T @ values, values.T @ targets
    return torch.stack([held @ _solve(gram, cross, strength, gram.diagonal().mean()) for strength in STRENGTHS])


def _fit_dual(values: Tensor, targets: Tensor, held: Tensor) -> Tensor:
    """Return what `_fit_primal` returns, by a system with one row for each image."""
    gram, kernel = values @ values.T, held @ values.T
    scale = gram.diagonal().sum() / values.shape[1]
    return torch.stack([kernel @ _solve(gram, targets, strength, scale) for strength in STRENGTHS])


def _solve(gram: Tensor, right: Tensor, strength: float, scale: Tensor) -> Tensor:
    matrix = gram + torch.eye(len(gram), dtype=gram.dtype) * (strength * scale)
    return torch.cholesky_solve(right, torch.linalg.cholesky(matrix))


def _judge(probabilities: npt.NDArray[np.float32], labels: Labels) -> list[Suspect]:
    count, classes = probabilities.shape
    sizes = np.bincount(labels, minlength=classes)
    own = probabilities[np.arange(count), labels]
    typical = np.bincount(labels, own, classes) / np.maximum(sizes, 1)
    best = probabilities.argmax(1)
    score = probabilities[np.arange(count), best]
    suspicious = (
        (best != labels)
        & (score >= np.maximum(_OTHER * typical[best], 0.5))
        & (own <= _OWN * typical[labels])
        & (sizes[labels] >= LEAST_IMAGES)
    )
    rows = np.flatnonzero(suspicious)
    order = rows[np.argsort(own[rows] - score[rows], kind="stable")]
    return [Suspect(int(row), int(best[row]), float(score[row])) for row in order]
