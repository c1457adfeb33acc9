"""How fast a run is: images per second and milliseconds per step.

The arithmetic: speed is the sum of samples over the sum of seconds, over all log intervals but the first, which holds
one-time costs. With one interval only, that one is used, and `first_excluded` says so.
"""

from dataclasses import dataclass


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
