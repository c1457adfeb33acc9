"""Times of work that is done again and again: variants take turns, the first value is dropped, the rest is summed up.

A machine is noisy, and its noise changes from second to second. Variants that are compared therefore take turns of some
milliseconds, so that whatever else happens hits all of them alike. The first call of all pays for one-time work, and
the first call of a turn finds the caches as the other variants left them; neither counts.

Where the time of some work goes: a trace for chrome://tracing or Perfetto, and the operators that took most.
"""

import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from convolve.errors import ConvolveError

TURN_SECONDS = 0.05
MIN_TURNS = 3
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


def time_alternating(works: Mapping[str, Work], *, seconds: float) -> dict[str, Times]:
    """Measure each work for about as many seconds, in turns."""
    for work in works.values():
        work()
    turns: dict[str, list[list[float]]] = {name: [] for name in works}
    end = time.perf_counter() + seconds * len(works)
    while time.perf_counter() < end or len(next(iter(turns.values()))) < MIN_TURNS:
        for name, work in works.items():
            turns[name].append(_time_turn(work))
    return {name: Times(1000 * np.array(sum(found, [])), first_excluded=True) for name, found in turns.items()}


def _time_turn(work: Work) -> list[float]:
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


TOP = 12


@dataclass(frozen=True)
class Operator:
    """One kind of operation; `ms` is its own time in all of its calls, `share` that of the time of all operators."""

    name: str
    calls: int
    ms: float
    share: float


def require_folder(trace: Path) -> None:
    """A trace needs a folder to lie in; that is known before anything is measured."""
    if not trace.parent.is_dir():
        raise ConvolveError(f"--profile {trace}: there is no folder {trace.parent}; make it, or choose another")


def profile(work: Callable[[], object], trace: Path) -> list[Operator]:
    """Do the work once under torch's profiler, write the trace, and give the operators that took longest."""
    with torch_profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        work()
    profiler.export_chrome_trace(str(trace))
    found = profiler.key_averages()
    whole = sum(one.self_cpu_time_total for one in found) or 1.0
    longest = sorted(found, key=lambda one: -one.self_cpu_time_total)[:TOP]
    return [
        Operator(one.key, one.count, one.self_cpu_time_total / 1000, one.self_cpu_time_total / whole) for one in longest
    ]
