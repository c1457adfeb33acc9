"""Announce slow steps early.

A step over many micro batches, such as one of an emulated config with the global batch of 16 devices, can take minutes.
The first micro batch of a run is measured, and if the whole step will take more than a minute, the expected times of
the step and of the run are printed before the second one starts. Asynchronous devices are not waited for.
"""

import time
from collections.abc import Callable
from typing import Protocol

from convolve.engine.throughput import ClockFn

SLOW_SECONDS = 60.0


class Pace(Protocol):
    """Receives the progress inside of steps."""

    def on_step_start(self) -> None:
        """Note the start of a step."""

    def on_micro_batch(self, count: int) -> None:
        """Note a finished micro batch of a step that has `count` of them."""


class NoPace:
    """Announces nothing."""

    def on_step_start(self) -> None:
        pass

    def on_micro_batch(self, count: int) -> None:
        pass


class SlowStepNotice:
    """Prints the expected times once, if they are long.

    Args:
        info: prints a line.
        steps: number of steps until the end of the run.
    """

    def __init__(self, info: Callable[[str], None], steps: int, clock: ClockFn = time.perf_counter) -> None:
        self._info, self._steps, self._clock = info, steps, clock
        self._started: float | None = None
        self._measured = False

    def on_step_start(self) -> None:
        if self._started is None:
            self._started = self._clock()

    def on_micro_batch(self, count: int) -> None:
        if self._measured or self._started is None:
            return
        self._measured = True
        step = (self._clock() - self._started) * count
        if step > SLOW_SECONDS:
            self._info(
                f"a step will take about {format_duration(step)} ({count} micro batches), "
                f"the remaining {self._steps} steps about {format_duration(step * self._steps)}"
            )


def format_duration(seconds: float) -> str:
    """Return a duration in minutes, hours or days."""
    for size, unit in ((86400.0, "days"), (3600.0, "hours")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.1f} minutes"
