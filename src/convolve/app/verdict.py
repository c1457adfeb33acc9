"""What a comparison of number formats comes to, in one sentence."""

from collections.abc import Sequence
from typing import Protocol

LOST_TOO_MUCH = 0.5
TOO_LITTLE_PROGRESS = 0.75


class Comparable(Protocol):
    """What is known about one policy."""

    name: str
    policy: str
    accuracies: list[float]
    curve: list[tuple[int, float]]
    skipped_steps: int
    failure: str | None

    @property
    def accuracy(self) -> float | None:
        """The mean accuracy."""

    @property
    def lost_updates(self) -> float:
        """Share of weight updates that were rounded away."""


def judge(candidates: Sequence[Comparable], points: float) -> str:
    """One sentence: a clause for each policy against the first."""
    reference, *others = candidates
    return "; ".join(_clause(other, reference, points) for other in others) + "."


def _clause(one: Comparable, reference: Comparable, points: float) -> str:
    if one.failure is not None:
        return f"{one.name} fails ({one.failure.partition(';')[0]})"
    progress = _progress(one, reference)
    if one.lost_updates > LOST_TOO_MUCH and progress is not None and progress < TOO_LITTLE_PROGRESS:
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


def _loss_note(one: Comparable) -> str:
    notes = []
    if one.skipped_steps:
        notes.append(f"{one.skipped_steps} steps skipped")
    if one.lost_updates > LOST_TOO_MUCH:
        notes.append(f"{one.lost_updates:.0%} of the weight updates rounded away")
    return f" ({', '.join(notes)})" if notes else ""


def _progress(one: Comparable, reference: Comparable) -> float | None:
    """The fall of the loss as a share of the reference's."""
    if len(one.curve) < 2 or len(reference.curve) < 2:
        return None
    start = reference.curve[0][1]
    whole = start - reference.curve[-1][1]
    return (start - one.curve[-1][1]) / whole if whole > 0 else None
