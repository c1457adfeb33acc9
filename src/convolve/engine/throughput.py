"""How fast a run is: images per second and milliseconds per step.

The arithmetic: speed is the sum of samples over the sum of seconds, over all log intervals but the first, which holds
one-time costs. With one interval only, that one is used, and `first_excluded` says so.

What happens between steps: log, validate, save. Each action decides by its rhythm whether it is due.

The loop: the only place with rhythm.

for each global batch, until the run is complete or somebody asks to stop:
    train_step
    every action that is due: log, validate, save
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from convolve.engine.state import TrainState


@dataclass(frozen=True)
class Interval:
    """What happened between two log points; `waited_seconds` of the `seconds` were spent waiting for data."""

    steps: int
    samples: int
    seconds: float
    waited_seconds: float

    @property
    def data_wait_share(self) -> float:
        """Waiting for data as a share of 1 of the time."""
        return self.waited_seconds / self.seconds if self.seconds > 0 else 0.0


class Throughput:
    """Collects log intervals, and tells the speed of each one and of the run.

    Args:
        data_wait_included: whether time spent waiting for data counts; if not, the speed is that of computing alone.
    """

    def __init__(self, *, data_wait_included: bool = True) -> None:
        self.data_wait_included = data_wait_included
        self._first: Interval | None = None
        self._rest = Interval(0, 0, 0.0, 0.0)

    def feed(self, *, steps: int, samples: int, seconds: float, waited_seconds: float) -> Interval:
        """Add the interval since the last log point, and return it."""
        interval = Interval(steps, samples, seconds, waited_seconds)
        if self._first is None:
            self._first = interval
        else:
            self._rest = Interval(
                self._rest.steps + steps,
                self._rest.samples + samples,
                self._rest.seconds + seconds,
                self._rest.waited_seconds + waited_seconds,
            )
        return interval

    @property
    def first_excluded(self) -> bool:
        """Whether the first interval is left out of the figures, that is, whether there is another one."""
        return self._rest.steps > 0

    @property
    def counted(self) -> Interval | None:
        """All that counts, as one interval; None before the first log point."""
        return self._rest if self.first_excluded else self._first

    @property
    def images_per_second(self) -> float | None:
        """Samples per second over the run; None before the first log point."""
        return None if self.counted is None else self.speed_of(self.counted)

    @property
    def ms_per_step(self) -> float | None:
        """Milliseconds per weight update over the run; None before the first log point."""
        return None if self.counted is None else self.step_time_of(self.counted)

    def speed_of(self, interval: Interval) -> float:
        """Samples per second in one interval."""
        return interval.samples / max(self._seconds(interval), 1e-9)

    def step_time_of(self, interval: Interval) -> float:
        """Milliseconds per weight update in one interval."""
        return 1000 * self._seconds(interval) / max(interval.steps, 1)

    def _seconds(self, interval: Interval) -> float:
        return interval.seconds - (0.0 if self.data_wait_included else interval.waited_seconds)


class Stopwatch:
    """Seconds spent in training itself; validation and saving pause it."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._paused = 0.0

    @property
    def seconds(self) -> float:
        """Seconds that counted so far."""
        return time.perf_counter() - self._started - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began


@dataclass
class Timer:
    """The stopwatch of a run and what was read from it last; `earlier` are the seconds before a restore."""

    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    throughput: Throughput = field(default_factory=Throughput)
    earlier: float = 0.0
    seconds: float = 0.0
    samples: int = 0
    step: int = 0
    waited: float = 0.0

    def lap(self, state: TrainState, waited: float) -> Interval:
        """What happened since the last reading."""
        now = self.stopwatch.seconds
        interval = self.throughput.feed(
            steps=state.step - self.step,
            samples=state.samples - self.samples,
            seconds=now - self.seconds,
            waited_seconds=waited - self.waited,
        )
        self.seconds, self.samples, self.step, self.waited = now, state.samples, state.step, waited
        return interval
