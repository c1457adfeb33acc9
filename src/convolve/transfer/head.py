"""A linear classifier on features: logistic regression with an L2 penalty.

The arithmetic: with features standardized over the training images, z = (x - mean) / std, the weights minimize

    mean over images of loss(W z + b, label) + strength |W|^2

where the loss is the cross-entropy, times the weight of the class if there are class weights. With several labels per
image it is the sum over labels of the binary cross-entropy, so each label has a logistic regression. All of this
is convex and smooth, so L-BFGS finds its minimum in few passes. The strength is the strongest of `STRENGTHS` whose loss
on images that were not fitted is within 2 % of the lowest: K-fold cross-validation, or one held-out fold if there are
many images. Standardization is folded into the result: weights W / std and bias b - W (mean / std)
apply to x.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from convolve.device import use_threads
from convolve.download import Progress, ignore_progress
from convolve.rng import epoch_permutation

STRENGTHS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4)  # strong to weak: each fit starts from the one before
FOLDS = 4
SLACK = 1.02
MAX_CROSS_VALIDATED = 5000
MAX_ITERATIONS = 100
TOLERANCE = 1e-6
_MIN_STD = 1e-3
_SEED = 0
_PARALLEL_PRODUCTS = 1 << 26


HeadLoss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of logits [N, classes] and labels [N], or [N, classes] of 0 and 1."""


@dataclass(frozen=True)
class Head:
    """Weights [classes, width] and bias [classes] of a classifier, and the strength of its penalty."""

    weight: Tensor
    bias: Tensor
    strength: float


def fit_head(
    features: Tensor,
    labels: Tensor,
    classes: int,
    progress: Progress = ignore_progress,
    strength: float | None = None,
    loss: HeadLoss = functional.cross_entropy,
) -> Head:
    """Return the classifier of features [N, width] with a penalty: the one that generalizes best if none is given."""
    mean, std = features.mean(0), features.std(0, correction=0).clamp_min(_MIN_STD)
    scaled = (features - mean) / std
    # Small products are faster with one thread.
    with use_threads(1 if features.numel() * classes < _PARALLEL_PRODUCTS else torch.get_num_threads()):
        strength = strength or _choose_strength(scaled, labels, classes, progress, loss)
        weight, bias = _fit(scaled, labels, strength, _zeros(scaled, classes), loss)
    weight = weight / std
    return Head(weight, bias - weight @ mean, strength)


def _zeros(features: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    return features.new_zeros(classes, features.shape[1]), features.new_zeros(classes)


def _choose_strength(features: Tensor, labels: Tensor, classes: int, progress: Progress, loss: HeadLoss) -> float:
    """Return the strongest penalty with almost the lowest loss; no weaker one is tried once the loss increases."""
    fold = torch.from_numpy(epoch_permutation(_SEED, 0, len(labels))) % FOLDS
    held = [fold == number for number in range(FOLDS if len(labels) <= MAX_CROSS_VALIDATED else 1)]
    held = [rows for rows in held if rows.any() and not rows.all()]
    starts, losses = [_zeros(features, classes)] * len(held), list[float]()
    for index, strength in enumerate(STRENGTHS):
        starts = [
            _fit(features[~rows], labels[~rows], strength, start, loss)
            for rows, start in zip(held, starts, strict=True)
        ]
        scores = [
            loss(_logits(features[rows], fitted), labels[rows]) for rows, fitted in zip(held, starts, strict=True)
        ]
        losses.append(float(sum(scores)))
        progress("fit the classifier", index + 1, len(STRENGTHS))
        if losses[-1] > min(losses):
            break
    return next(strength for strength, found in zip(STRENGTHS, losses, strict=False) if found <= SLACK * min(losses))


def _logits(features: Tensor, parameters: tuple[Tensor, Tensor]) -> Tensor:
    return functional.linear(features, *parameters)


def _fit(
    features: Tensor, labels: Tensor, strength: float, start: tuple[Tensor, Tensor], loss: HeadLoss
) -> tuple[Tensor, Tensor]:
    weight, bias = (tensor.clone().requires_grad_() for tensor in start)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=MAX_ITERATIONS, tolerance_grad=TOLERANCE, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = loss(_logits(features, (weight, bias)), labels) + strength * weight.square().sum()
        torch.autograd.backward(total)
        return total

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()
