"""A linear classifier on features: multinomial logistic regression with an L2 penalty.

The arithmetic: with features standardized over the training images, z = (x - mean) / std, the weights minimize

    mean over images of cross-entropy(W z + b, label) + strength |W|^2

which is convex and smooth, so L-BFGS finds its minimum in few passes. The strength is the one of `STRENGTHS` with the
lowest cross-entropy on images that were not fitted: K-fold cross-validation, or one held-out fold if there are many
images. Standardization is folded into the result: weights W / std and bias b - W (mean / std) apply to x.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from convolve.download import Progress, ignore_progress
from convolve.rng import epoch_permutation

STRENGTHS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)  # strong to weak: each fit starts from the one before
FOLDS = 4
MAX_CROSS_VALIDATED = 5000
MAX_ITERATIONS = 100
TOLERANCE = 1e-6
_MIN_STD = 1e-3
_SEED = 0


@dataclass(frozen=True)
class Head:
    """Weights [classes, width] and bias [classes] of a classifier, and the strength of its penalty."""

    weight: Tensor
    bias: Tensor
    strength: float


def fit_head(features: Tensor, labels: Tensor, classes: int, progress: Progress = ignore_progress) -> Head:
    """Return the classifier of features [N, width] whose penalty generalizes best."""
    mean, std = features.mean(0), features.std(0, correction=0).clamp_min(_MIN_STD)
    scaled = (features - mean) / std
    strength = _choose_strength(scaled, labels, classes, progress)
    weight, bias = _fit(scaled, labels, strength, _zeros(scaled, classes))
    weight = weight / std
    return Head(weight, bias - weight @ mean, strength)


def _zeros(features: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    return features.new_zeros(classes, features.shape[1]), features.new_zeros(classes)


def _choose_strength(features: Tensor, labels: Tensor, classes: int, progress: Progress) -> float:
    fold = torch.from_numpy(epoch_permutation(_SEED, 0, len(labels))) % FOLDS
    folds = range(FOLDS if len(labels) <= MAX_CROSS_VALIDATED else 1)
    losses = np.zeros(len(STRENGTHS))
    for number in folds:
        held = fold == number
        if held.all() or not held.any():
            return STRENGTHS[len(STRENGTHS) // 2]
        start = _zeros(features, classes)
        for index, strength in enumerate(STRENGTHS):
            start = _fit(features[~held], labels[~held], strength, start)
            losses[index] += float(functional.cross_entropy(_logits(features[held], start), labels[held]))
            progress("head", number * len(STRENGTHS) + index + 1, len(folds) * len(STRENGTHS))
    return STRENGTHS[int(losses.argmin())]


def _logits(features: Tensor, parameters: tuple[Tensor, Tensor]) -> Tensor:
    return functional.linear(features, *parameters)


def _fit(features: Tensor, labels: Tensor, strength: float, start: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    weight, bias = (tensor.clone().requires_grad_() for tensor in start)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=MAX_ITERATIONS, tolerance_grad=TOLERANCE, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(_logits(features, (weight, bias)), labels) + strength * weight.square().sum()
        torch.autograd.backward(loss)
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()
