"""Conclusion of a comparison of number formats: no more than its seeds and test images support.

With accuracies a_i and b_i of k seeds on the same n test images, d = mean(b_i - a_i) has a 95 % interval of

    sqrt((t s / sqrt(k))^2 + (1.96 e)^2)      s: standard deviation of b_i - a_i, t: Student's t of k - 1 degrees
                                              e^2 = (a (1 - a) + b (1 - b)) / n, the error of n sampled images

The second term assumes that both formats err on independent images. They mostly err on the same ones, so the interval
is too wide rather than too narrow. With one seed the first term is unknown, and nothing is attributed to a format.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convolve.alignment.lockstep import Difference

MAX_LOST_FRACTION = 0.5
MIN_PROGRESS = 0.75

# Two-sided 95 % points of Student's t for 1 to 9 degrees of freedom; beyond, the normal value is near enough.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_NORMAL95 = 1.96


@dataclass(frozen=True)
class Comparison:
    """Difference of two mean accuracies in percentage points, and half of its 95 % interval."""

    points: float
    interval: float
    seeds: int
    images: int

    def is_within(self, points: float) -> bool:
        """Return whether the whole interval is. One seed does not show how much seeds vary."""
        return self.seeds > 1 and abs(self.points) + self.interval <= points

    @property
    def excludes_zero(self) -> bool:
        return abs(self.points) > self.interval

    def __str__(self) -> str:
        seeds = f"{self.seeds} seed{'s' if self.seeds > 1 else ''}"
        return f"{self.points:+.2f} ± {self.interval:.2f} points over {seeds} and {self.images:,} images"


@dataclass
class PolicyResult:
    """Runs of one policy, and their comparison with the first policy."""

    name: str
    policy: str
    accuracies: list[float] = field(default_factory=list)
    test_samples: int = 0
    interval: float | None = None
    difference: Comparison | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)
    skipped_steps: int = 0
    failure: str | None = None
    first_divergence: Difference | None = None
    layers: list[Difference] = field(default_factory=list)
    survey: dict[str, Any] = field(default_factory=dict)
    runs: list[Path] = field(default_factory=list)
    update_energy: float = 0.0
    lost_energy: float = 0.0

    @property
    def accuracy(self) -> float | None:
        """Mean over seeds."""
        return sum(self.accuracies) / len(self.accuracies) if self.accuracies else None

    @property
    def lost_updates(self) -> float:
        """Fraction of the weight updates that was rounded away, over all layers and lockstep steps."""
        return min(max(self.lost_energy / self.update_energy, 0.0), 1.0) if self.update_energy else 0.0


def compare_accuracies(one: PolicyResult, reference: PolicyResult) -> Comparison | None:
    """Compare accuracies, paired by seed; None if they were not both validated."""
    seeds, images = min(len(one.accuracies), len(reference.accuracies)), min(one.test_samples, reference.test_samples)
    if not seeds or not images:
        return None
    differences = [one.accuracies[seed] - reference.accuracies[seed] for seed in range(seeds)]
    error = math.hypot(
        *(_sampling_error(sum(result.accuracies) / len(result.accuracies), images) for result in (one, reference))
    )
    interval = math.hypot(interval_95(differences) or 0.0, _NORMAL95 * error)
    return Comparison(100 * sum(differences) / seeds, 100 * interval, seeds, images)


def _sampling_error(accuracy: float, images: int) -> float:
    """Return the standard error of an accuracy; two images of each outcome are added, or it would be 0 at 100 %."""
    rate = (accuracy * images + 2) / (images + 4)
    return math.sqrt(rate * (1 - rate) / (images + 4))


def conclude(candidates: Sequence[PolicyResult], points: float) -> str:
    """Return one sentence with a clause for each policy against the first."""
    reference, *others = candidates
    return "; ".join(_clause(other, reference, points) for other in others) + "."


def _clause(one: PolicyResult, reference: PolicyResult, points: float) -> str:
    if one.failure is not None:
        return f"{one.name} fails ({one.failure})"
    progress = _progress(one, reference)
    if one.lost_updates > MAX_LOST_FRACTION and progress is not None and progress < MIN_PROGRESS:
        return (
            f"{one.name} stalls: {one.lost_updates:.0%} of the weight updates are rounded away, and its loss falls by "
            f"{max(progress, 0):.0%} of what {reference.name} gains"
        )
    difference = compare_accuracies(one, reference)
    if difference is None:
        return (
            f"{one.name} and {reference.name} were not both validated, so no accuracy can be compared{_loss_note(one)}"
        )
    figures = f"{one.accuracy:.2%} against {reference.accuracy:.2%}, {difference}{_loss_note(one)}"
    if difference.is_within(points):
        return f"{one.name} agrees with {reference.name} within {points:g} points: {figures}"
    if not difference.excludes_zero:
        return (
            f"{one.name} and {reference.name}: no difference detected, {figures}, too few to show agreement within "
            f"{points:g} points"
        )
    word = "better" if difference.points > 0 else "worse"
    if difference.seeds == 1:
        return f"{one.name} was {word} than {reference.name} with this seed, {figures}, too few to generalize"
    return f"{one.name} is {word} than {reference.name}: {figures}"


def _loss_note(one: PolicyResult) -> str:
    notes = []
    if one.skipped_steps:
        notes.append(f"{one.skipped_steps} steps skipped")
    if one.lost_updates > MAX_LOST_FRACTION:
        notes.append(f"{one.lost_updates:.0%} of the weight updates rounded away")
    return f" ({', '.join(notes)})" if notes else ""


def _progress(one: PolicyResult, reference: PolicyResult) -> float | None:
    """Return the decrease of the loss as a fraction of the reference's."""
    if len(one.curve) < 2 or len(reference.curve) < 2:
        return None
    start = reference.curve[0][1]
    whole = start - reference.curve[-1][1]
    return (start - one.curve[-1][1]) / whole if whole > 0 else None


def interval_95(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % confidence interval of a mean; None for fewer than two values."""
    count = len(values)
    if count < 2:
        return None
    mean = sum(values) / count
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    factor = _T95[count - 2] if count - 2 < len(_T95) else 1.96
    return factor * spread / math.sqrt(count)
