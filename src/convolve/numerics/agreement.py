"""How far two computations agree: direction, size of the difference, and how much of an update was rounded away.

With a the reference and b the other: cosine = a.b / |a||b|, relative error = |a - b| / |a|, and the share of the update
that was lost is 1 - a.b / a.a. Stochastic rounding moves few weights, each too far: on the whole it loses nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

# Two-sided 95 % points of Student's t for 1 to 9 degrees of freedom; beyond, the normal value is near enough.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Agreement:
    """One tensor of two computations; `energy` is the reference's squared length."""

    cosine: float
    relative_error: float
    lost_share: float
    energy: float


def compare(reference: Tensor, other: Tensor) -> Agreement:
    """Compare a tensor with its reference."""
    a, b = reference.detach().double().flatten(), other.detach().double().flatten()
    if not bool(b.isfinite().all()):
        return Agreement(math.nan, math.inf, 0.0, 0.0)
    norms = float(a.norm()), float(b.norm())
    cosine = float(a @ b) / (norms[0] * norms[1]) if all(norms) else float(norms[0] == norms[1])
    error = float((a - b).norm()) / norms[0] if norms[0] else (0.0 if not norms[1] else math.inf)
    energy = norms[0] ** 2
    return Agreement(min(cosine, 1.0), error, 1.0 - float(a @ b) / energy if energy else 0.0, energy)


def interval_95(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of a mean; None for fewer than two values."""
    count = len(values)
    if count < 2:
        return None
    mean = sum(values) / count
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    factor = _T95[count - 2] if count - 2 < len(_T95) else 1.96
    return factor * spread / math.sqrt(count)
