"""Training time and throughput.

The arithmetic: throughput is the sum of samples over the sum of seconds of all log intervals except the first, which
contains one-time costs. If there is only one interval, it is used, and `first_excluded` is False. Time spent waiting
for data counts; time in which the loop paused the timer (validation, saving) does not.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

ClockFn = Callable[[], float]


@dataclass(frozen=True)
class Interval:
    """Training between two log points; `waited_seconds` of the `seconds` were spent waiting for data."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0

    @property
    def images_per_second(self) -> float:
        """Samples per second."""
        return self.samples / max(self.seconds, 1e-9)

    @property
    def ms_per_step(self) -> float:
        """Milliseconds per optimizer update."""
        return 1000 * self.seconds / max(self.steps, 1)

    @property
    def data_wait_share(self) -> float:
        """Fraction of the time spent waiting for data."""
        return self.waited_seconds / self.seconds if self.seconds > 0 else 0.0

    def __sub__(self, earlier: "Interval") -> "Interval":
        return Interval(
            self.steps - earlier.steps,
            self.samples - earlier.samples,
            self.seconds - earlier.seconds,
            self.waited_seconds - earlier.waited_seconds,
        )


class Timer:
    """Measures training time; the loop pauses it during callbacks that are not part of training.

    Args:
        clock: returns seconds; tests pass a fake one.
        step, samples: position at the start, not zero for a resumed run.
        previous_seconds: training time of the run before it was resumed.
    """

    def __init__(
        self, clock: ClockFn = time.perf_counter, *, step: int = 0, samples: int = 0, previous_seconds: float = 0.0
    ) -> None:
        self.clock = clock
        self._previous_seconds = previous_seconds
        self._started, self._paused_seconds = clock(), 0.0
        self._paused_at: float | None = None
        self._start = self._last = Interval(step, samples)
        self._first_end: Interval | None = None

    @property
    def seconds(self) -> float:
        """Training time of this process so far."""
        now = self.clock() if self._paused_at is None else self._paused_at
        return now - self._started - self._paused_seconds

    @property
    def total_seconds(self) -> float:
        """Training time of the run, before it was resumed included."""
        return self._previous_seconds + self.seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the block."""
        self._paused_at = self.clock()
        try:
            yield
        finally:
            self._paused_seconds += self.clock() - self._paused_at
            self._paused_at = None

    def split(self, *, step: int, samples: int, waited_seconds: float) -> Interval:
        """End the current interval at a position and return it; `waited_seconds` counts from the start."""
        now = Interval(step, samples, self.seconds, waited_seconds)
        interval, self._last = now - self._last, now
        self._first_end = self._first_end or now
        return interval

    @property
    def first_excluded(self) -> bool:
        """True once there is a second interval, from when on the first is not counted."""
        return self._first_end is not None and self._last.steps > self._first_end.steps

    @property
    def measured(self) -> Interval | None:
        """All counted intervals as one; None before the first log point."""
        if self._first_end is None:
            return None
        return self._last - (self._first_end if self.first_excluded else self._start)
