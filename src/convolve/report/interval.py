"""Confidence interval of an accuracy.

Wilson's score interval of k correct predictions of n, with p = k / n and z = 1.96 for 95 %:

    (p + z^2 / 2n  +/-  z * sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

It stays inside [0, 1], and it is not empty if all predictions are correct.
"""

import math

_Z = 1.96  # 95 % of a normal distribution


def confidence_interval(accuracy: float, count: int) -> tuple[float, float]:
    """Return both ends of the 95 % interval of an accuracy in [0, 1] measured on `count` images."""
    square = _Z**2 / count
    center = (accuracy + square / 2) / (1 + square)
    half = half_width(accuracy, count)
    return max(0.0, center - half), min(1.0, center + half)


def half_width(accuracy: float, count: int) -> float:
    """Return half the width of that interval."""
    square = _Z**2 / count
    return _Z / (1 + square) * math.sqrt(accuracy * (1 - accuracy) / count + square / (4 * count))
