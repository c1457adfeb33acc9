"""When something is due. Everything is counted in samples, so a restart or another batch size keeps the beat."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Rhythm:
    """Due each time the position crosses a multiple of `every` samples, and at the end of the run; None: only there."""

    every: Fraction | None
    total: int

    def due(self, before: int, now: int) -> bool:
        """Whether a beat lies in (before, now]."""
        if now >= self.total:
            return True
        if self.every is None:
            return False
        return bool(now // self.every > before // self.every)


def never(total: int) -> Rhythm:
    """No beat but the last."""
    return Rhythm(None, total)
