"""Where the time of some work goes: a trace for chrome://tracing or Perfetto, and the operators that took most."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from convolve.errors import ConvolveError

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
