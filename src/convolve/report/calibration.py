"""Expected calibration error (ECE), reliability bins, and temperature scaling.

Images are put into 15 bins by the probability of the predicted class. ECE is the mean over images of
|accuracy of the bin - mean probability of the bin|. A temperature T divides the logits; it changes no prediction. T
minimizes the mean negative log-likelihood on every second image; the remaining error is measured on the others.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
BINS = 15
_RANGE = (0.05, 20.0)
_STEPS = 60


@dataclass(frozen=True)
class Bin:
    """Images whose predicted class has a probability in one range."""

    images: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """Calibration of one model; the two `held_out` errors are measured on images that T was not fitted on."""

    error: float
    negative_log_likelihood: float
    bins: tuple[Bin, ...]
    temperature: float
    held_out_error: float
    held_out_error_after: float


def softmax(logits: Logits, temperature: float = 1.0) -> Floats:
    """Return the probabilities of the classes."""
    scaled = logits.astype(np.float64) / temperature
    powers = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def bin_predictions(probabilities: Floats, labels: Labels) -> tuple[Bin, ...]:
    """Return the reliability bins of predictions, including empty ones."""
    confidence, correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    numbers = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    bins = []
    for index in range(BINS):
        inside = numbers == index
        count = int(inside.sum())
        bins.append(
            Bin(count, float(confidence[inside].mean()), float(correct[inside].mean())) if count else Bin(0, 0.0, 0.0)
        )
    return tuple(bins)


def calibration_error(bins: tuple[Bin, ...]) -> float:
    """Return the expected calibration error of bins, in [0, 1]."""
    total = sum(entry.images for entry in bins)
    return sum(entry.images * abs(entry.accuracy - entry.confidence) for entry in bins) / max(total, 1)


def negative_log_likelihood(logits: Logits, labels: Labels, temperature: float = 1.0) -> float:
    """Return the mean negative log-likelihood of the labels."""
    probabilities = softmax(logits, temperature)[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(probabilities, 1e-300)).mean())


def fit_temperature(logits: Logits, labels: Labels) -> float:
    """Return the temperature with the smallest negative log-likelihood, by golden-section search of its logarithm."""
    ratio = (5**0.5 - 1) / 2
    low, high = np.log(_RANGE[0]), np.log(_RANGE[1])
    for _ in range(_STEPS):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if negative_log_likelihood(logits, labels, float(np.exp(left))) < negative_log_likelihood(
            logits, labels, float(np.exp(right))
        ):
            high = right
        else:
            low = left
        if high - low < 1e-4:
            break
    return float(np.exp((low + high) / 2))


def calibrate(logits: Logits, labels: Labels) -> Calibration:
    """Return all calibration figures of the logits of one model."""
    bins = bin_predictions(softmax(logits), labels)
    fitted, held = slice(0, None, 2), slice(1, None, 2) if len(labels) > 1 else slice(0, None)
    temperature = fit_temperature(logits[fitted], labels[fitted])
    return Calibration(
        error=calibration_error(bins),
        negative_log_likelihood=negative_log_likelihood(logits, labels),
        bins=bins,
        temperature=temperature,
        held_out_error=calibration_error(bin_predictions(softmax(logits[held]), labels[held])),
        held_out_error_after=calibration_error(bin_predictions(softmax(logits[held], temperature), labels[held])),
    )
