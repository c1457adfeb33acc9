"""Where the samples of an archive are, without numpy or torch: the sandbox that parses archives starts fast."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convolve.data.dataset import Skipped

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm")


@dataclass(frozen=True)
class SampleLocation:
    """One sample of an index under construction; `boxes` are left, top, right, bottom of objects as fractions."""

    file: int
    offset: int
    length: int
    label: int
    name: str
    boxes: tuple[tuple[float, float, float, float], ...] = ()


class SkippedEntries:
    """Entries of a data set that are not samples: how many for each reason, and the first example."""

    def __init__(self) -> None:
        self.reasons: dict[str, tuple[int, str]] = {}

    def add(self, reason: str, example: str) -> None:
        count, first = self.reasons.get(reason, (0, example))
        self.reasons[reason] = count + 1, first

    def listed(self) -> "tuple[Skipped, ...]":
        return tuple((reason, count, example) for reason, (count, example) in self.reasons.items())

    def update(self, other: "SkippedEntries") -> None:
        """Add the entries of another archive."""
        for reason, (count, example) in other.reasons.items():
            before, first = self.reasons.get(reason, (0, example))
            self.reasons[reason] = before + count, first
