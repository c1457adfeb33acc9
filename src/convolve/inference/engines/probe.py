"""Comparison of an engine or exported file with the model that it was made from.

The arithmetic: on images of noise, at batch sizes 1, 2, 7 and the one that an engine is compiled for, the difference is
max |a - b| / max |b|, where a are the logits of the engine and b those of the model. It may be at most 1e-4. Engines
sum products in other orders than torch, which changes about the last two of seven decimal digits; a wrong operator,
layout or weight changes the first ones.
Quantized files may differ by 0.1: engines round the activations of each layer differently by one step of 1/255.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from convolve.errors import ConvolveError
from convolve.inference.engines.base import Logits, Pixels

BATCH_SIZES = (1, 2, 7)
TOLERANCE = 1e-4
INT8_TOLERANCE = 0.1
Predictor = Callable[[Pixels], Logits]


@dataclass(frozen=True)
class VerifyResult:
    """Comparison with a model. The difference is that of logits, as a fraction of the largest logit."""

    batches: tuple[int, ...]
    largest_difference: float
    same_predictions: bool


def sample_pixels(height: int, width: int, channels: int, count: int = sum(BATCH_SIZES)) -> Pixels:
    """Return images that need no data set: noise, alternating with smoothed noise that reaches other activations."""
    noise = np.random.default_rng(0).integers(0, 256, (count, height, width, channels), dtype=np.uint8)
    smooth = (np.cumsum(noise, axis=1, dtype=np.int64) // 64 % 256).astype(np.uint8)
    return np.where((np.arange(count) % 2 == 0)[:, None, None, None], noise, smooth)


def relative_difference(logits: Logits, expected: Logits) -> float:
    """Return the largest difference as a fraction of the largest expected logit."""
    return float(np.abs(expected - logits).max() / max(float(np.abs(expected).max()), 1e-30))


def compare(
    predictor: Predictor, reference: Predictor, pixels: Pixels, sizes: tuple[int, ...] = BATCH_SIZES
) -> VerifyResult:
    """Run both functions on different images at several batch sizes."""
    differences, same, start = [0.0], True, 0
    for size in sizes:
        batch = np.ascontiguousarray(pixels[start : start + size])
        expected, logits = reference(batch), predictor(batch)
        if logits.ndim != 2 or len(logits) != size:
            raise ConvolveError(f"export: output has shape {logits.shape} for {size} images; try another --format")
        differences.append(relative_difference(logits, expected))
        same = same and bool((expected.argmax(1) == logits.argmax(1)).all())
        start += size
    # np.max keeps NaN, which max would drop.
    return VerifyResult(sizes, float(np.max(differences)), same)
