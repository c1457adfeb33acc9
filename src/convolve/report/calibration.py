"""Whether probabilities can be believed: expected calibration error, reliability, and the temperature that mends it.

The arithmetic: images are put into 15 bins by the probability of the answer. ECE is the mean over images of
|accuracy of the bin - mean probability of the bin|. A temperature T divides the logits; it changes no answer. T
minimizes the mean negative log-likelihood on every second image, and the error that it leaves is measured on the
others, so that the figure is not its own judge.
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
    """The images whose answer has a probability in one range."""

    images: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """Calibration of one network; the two `held_out` errors are measured on the images that T did not see."""

    error: float
    negative_log_likelihood: float
    bins: tuple[Bin, ...]
    temperature: float
    held_out_error: float
    held_out_error_after: float


def softmax(logits: Logits, temperature: float = 1.0) -> Floats:
    """Probabilities of the classes."""
    scaled = logits.astype(np.float64) / temperature
    powers = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def sort_into_bins(shares: Floats, labels: Labels) -> tuple[Bin, ...]:
    """The reliability bins of predictions; empty ones are there too."""
    confidence, right = shares.max(axis=1), shares.argmax(axis=1) == labels
    place = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    bins = []
    for index in range(BINS):
        inside = place == index
        count = int(inside.sum())
        bins.append(
            Bin(count, float(confidence[inside].mean()), float(right[inside].mean())) if count else Bin(0, 0.0, 0.0)
        )
    return tuple(bins)


def calibration_error(bins: tuple[Bin, ...]) -> float:
    """The expected calibration error of bins, a share of 1."""
    total = sum(one.images for one in bins)
    return sum(one.images * abs(one.accuracy - one.confidence) for one in bins) / max(total, 1)


def negative_log_likelihood(logits: Logits, labels: Labels, temperature: float = 1.0) -> float:
    """Mean negative log-likelihood of the right classes."""
    shares = softmax(logits, temperature)[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(shares, 1e-300)).mean())


def fit_temperature(logits: Logits, labels: Labels) -> float:
    """The temperature with the smallest negative log-likelihood, by golden section over its logarithm."""
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
    """All figures of calibration for the outputs of one network."""
    bins = sort_into_bins(softmax(logits), labels)
    fitted, held = slice(0, None, 2), slice(1, None, 2) if len(labels) > 1 else slice(0, None)
    temperature = fit_temperature(logits[fitted], labels[fitted])
    return Calibration(
        error=calibration_error(bins),
        negative_log_likelihood=negative_log_likelihood(logits, labels),
        bins=bins,
        temperature=temperature,
        held_out_error=calibration_error(sort_into_bins(softmax(logits[held]), labels[held])),
        held_out_error_after=calibration_error(sort_into_bins(softmax(logits[held], temperature), labels[held])),
    )
