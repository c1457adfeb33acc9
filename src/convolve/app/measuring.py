"""Times of work that is done again and again: variants take turns, the first value is dropped, the rest is summed up.

A machine is noisy, and its noise changes from second to second. Variants that are compared therefore take turns of some
milliseconds, so that whatever else happens hits all of them alike. The first call of all pays for one-time work, and
the first call of a turn finds the caches as the other variants left them; neither counts.
"""

import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TURN_SECONDS = 0.05
LEAST_TURNS = 3

Work = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Milliseconds of every call that counts; `first_excluded` tells whether calls were dropped before them."""

    milliseconds: npt.NDArray[np.float64]
    first_excluded: bool

    @property
    def mean(self) -> float:
        """The mean."""
        return float(self.milliseconds.mean())

    def quantile(self, share: float) -> float:
        """The time that a share of 1 of the calls keep to."""
        return float(np.quantile(self.milliseconds, share))


def take_turns(works: Mapping[str, Work], *, seconds: float) -> dict[str, Times]:
    """Measure each work for about as many seconds, in turns."""
    for work in works.values():
        work()
    turns: dict[str, list[list[float]]] = {name: [] for name in works}
    end = time.perf_counter() + seconds * len(works)
    while time.perf_counter() < end or len(next(iter(turns.values()))) < LEAST_TURNS:
        for name, work in works.items():
            turns[name].append(_take_turn(work))
    return {name: Times(1000 * np.array(sum(found, [])), first_excluded=True) for name, found in turns.items()}


def _take_turn(work: Work) -> list[float]:
    """Seconds of each call in one turn; the first is dropped where there are others."""
    found: list[float] = []
    end = time.perf_counter() + TURN_SECONDS
    while not found or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found[1:] or found


def peak_rss_bytes() -> int:
    """The most memory that this process has had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
