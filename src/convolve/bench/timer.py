"""Timing of repeated work in alternating turns, peak memory, and profiles.

The noise of a machine changes from second to second. Variants under comparison therefore alternate in turns of some
milliseconds, which spreads the noise over all of them. Two kinds of calls are not counted: the very first, which pays
one-time costs, and the first of each turn, which finds the caches as the other variants left them.
"""

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

try:
    import resource
except ImportError as error:
    raise ConvolveError("bench: memory cannot be measured on Windows; use Linux or macOS") from error

TURN_SECONDS = 0.05
MIN_TURNS = 3
TOP_OPERATORS = 12
Work = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Times:
    """Milliseconds of every counted call; `first_excluded` if calls before them were dropped."""

    milliseconds: npt.NDArray[np.float64]
    first_excluded: bool

    @property
    def mean(self) -> float:
        return float(self.milliseconds.mean())

    def quantile(self, fraction: float) -> float:
        return float(np.quantile(self.milliseconds, fraction))


def time_alternating(
    works: Mapping[str, Work], *, seconds: float, clock: Clock = time.perf_counter
) -> dict[str, Times]:
    """Measure each work for about `seconds`, in alternating turns."""
    for work in works.values():
        work()
    turns: dict[str, list[list[float]]] = {name: [] for name in works}
    end = clock() + seconds * len(works)
    while clock() < end or len(next(iter(turns.values()))) < MIN_TURNS:
        for name, work in works.items():
            turns[name].append(_time_turn(work, clock))
    return {name: Times(1000 * np.array(sum(calls, [])), first_excluded=True) for name, calls in turns.items()}


def _time_turn(work: Work, clock: Clock) -> list[float]:
    """Return the seconds of each call in one turn, without the first if there are others."""
    calls: list[float] = []
    end = clock() + TURN_SECONDS
    while not calls or clock() < end:
        start = clock()
        work()
        calls.append(clock() - start)
    return calls[1:] or calls


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


@dataclass(frozen=True)
class Operator:
    """One operator: self time of all its calls, and that as a fraction of the time of all operators."""

    name: str
    calls: int
    ms: float
    share: float


def require_folder(trace: Path) -> None:
    """Raise if the folder of a trace does not exist."""
    if not trace.parent.is_dir():
        raise ConvolveError(f"--profile {trace}: folder {trace.parent} does not exist; create it or choose another")


def profile(work: Callable[[], object], trace: Path) -> list[Operator]:
    """Run the work under torch's profiler, write a Chrome trace, and return the slowest operators."""
    with torch_profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        work()
    profiler.export_chrome_trace(str(trace))
    events = profiler.key_averages()
    total = sum(event.self_cpu_time_total for event in events) or 1.0
    slowest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:TOP_OPERATORS]
    return [
        Operator(event.key, event.count, event.self_cpu_time_total / 1000, event.self_cpu_time_total / total)
        for event in slowest
    ]
