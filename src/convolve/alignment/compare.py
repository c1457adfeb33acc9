"""Agreement of tensors in two number formats, and the conclusion of a comparison in one sentence.

With a the reference and b the other: cosine = a.b / |a||b|, relative error = |a - b| / |a|, and the lost fraction of an
update is 1 - a.b / a.a. Stochastic rounding moves few weights, each too far: on average it loses nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

MAX_LOST_FRACTION = 0.5
MIN_PROGRESS = 0.75


class PolicyOutcome(Protocol):
    """Results of one policy."""

    name: str
    policy: str
    accuracies: list[float]
    curve: list[tuple[int, float]]
    skipped_steps: int
    failure: str | None

    @property
    def accuracy(self) -> float | None:
        """Mean over seeds."""

    @property
    def lost_updates(self) -> float:
        """Fraction of the weight updates that was rounded away."""


def conclude(candidates: Sequence[PolicyOutcome], points: float) -> str:
    """Return one sentence with a clause for each policy against the first."""
    reference, *others = candidates
    return "; ".join(_clause(other, reference, points) for other in others) + "."


def _clause(one: PolicyOutcome, reference: PolicyOutcome, points: float) -> str:
    if one.failure is not None:
        return f"{one.name} fails ({one.failure})"
    progress = _progress(one, reference)
    if one.lost_updates > MAX_LOST_FRACTION and progress is not None and progress < MIN_PROGRESS:
        return (
            f"{one.name} stalls: {one.lost_updates:.0%} of the weight updates are rounded away, and its loss falls by "
            f"{max(progress, 0):.0%} of what {reference.name} gains"
        )
    ending = _loss_note(one)
    if one.accuracy is None or reference.accuracy is None:
        return f"{one.name} and {reference.name} were not both validated, so no accuracy can be compared{ending}"
    difference = 100 * (one.accuracy - reference.accuracy)
    word = "agrees with" if abs(difference) <= points else ("is better than" if difference > 0 else "is worse than")
    return (
        f"{one.name} {word} {reference.name}: {one.accuracy:.2%} against {reference.accuracy:.2%}, "
        f"{difference:+.2f} points over {len(one.accuracies)} seed{'s' if len(one.accuracies) > 1 else ''}{ending}"
    )


def _loss_note(one: PolicyOutcome) -> str:
    notes = []
    if one.skipped_steps:
        notes.append(f"{one.skipped_steps} steps skipped")
    if one.lost_updates > MAX_LOST_FRACTION:
        notes.append(f"{one.lost_updates:.0%} of the weight updates rounded away")
    return f" ({', '.join(notes)})" if notes else ""


def _progress(one: PolicyOutcome, reference: PolicyOutcome) -> float | None:
    """Return the decrease of the loss as a fraction of the reference's."""
    if len(one.curve) < 2 or len(reference.curve) < 2:
        return None
    start = reference.curve[0][1]
    whole = start - reference.curve[-1][1]
    return (start - one.curve[-1][1]) / whole if whole > 0 else None


# Two-sided 95 % points of Student's t for 1 to 9 degrees of freedom; beyond, the normal value is near enough.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Agreement:
    """Agreement of one tensor with its reference; `energy` is the reference's squared norm."""

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
    """Return half the width of the 95 % confidence interval of a mean; None for fewer than two values."""
    count = len(values)
    if count < 2:
        return None
    mean = sum(values) / count
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    factor = _T95[count - 2] if count - 2 < len(_T95) else 1.96
    return factor * spread / math.sqrt(count)
