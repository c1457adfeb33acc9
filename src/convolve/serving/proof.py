"""Proof that an exported file computes what the network computes, at several batch sizes."""

from dataclasses import dataclass

import numpy as np

from convolve.errors import ConvolveError
from convolve.serving.exported import Logits, Pixels, Runner

BATCHES = (1, 2, 7)
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Proof:
    """What the comparison found; the difference is that of logits, as a share of the largest."""

    batches: tuple[int, ...]
    largest_difference: float
    same_answers: bool


def sample_pixels(height: int, width: int, channels: int, count: int = sum(BATCHES)) -> Pixels:
    """Test images that need no data set: noise, and noise made smooth, which reaches other activations."""
    noise = np.random.default_rng(0).integers(0, 256, (count, height, width, channels), dtype=np.uint8)
    smooth = (np.cumsum(noise, axis=1, dtype=np.int64) // 64 % 256).astype(np.uint8)
    return np.where((np.arange(count) % 2 == 0)[:, None, None, None], noise, smooth)


def compare(runner: Runner, reference: Runner, pixels: Pixels) -> Proof:
    """Run both on batches of 1, 2 and 7 different images."""
    differences, same, start = [0.0], True, 0
    for size in BATCHES:
        batch = np.ascontiguousarray(pixels[start : start + size])
        ours, theirs = reference(batch), _checked(runner(batch), size)
        differences.append(float(np.abs(ours - theirs).max() / max(float(np.abs(ours).max()), 1e-30)))
        same = same and bool((ours.argmax(1) == theirs.argmax(1)).all())
        start += size
    return Proof(BATCHES, max(differences), same)


def require_equal(proof: Proof, what: str) -> None:
    """Refuse an export whose logits are not those of the network."""
    if not proof.largest_difference <= TOLERANCE:
        raise ConvolveError(
            f"{what}: its logits differ from the network's by {proof.largest_difference:.2g} of the largest, more than "
            f"{TOLERANCE:g}; nothing was written; try another --format"
        )


def _checked(logits: Logits, size: int) -> Logits:
    if logits.ndim != 2 or len(logits) != size:
        raise ConvolveError(f"the export gives an output of shape {logits.shape} for {size} images; try another format")
    return logits
