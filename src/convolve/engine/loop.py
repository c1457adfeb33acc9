"""The loop: the only place with rhythm.

for each window of samples, until the run is complete or somebody asks to stop:
    train_step
    every action that is due: log, validate, save
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from convolve.data.loader import Window
from convolve.engine.state import TrainState
from convolve.engine.step import StepParts, train_step
from convolve.engine.stopping import StopRequest


class Action(Protocol):
    """Something that happens between steps."""

    def after(self, before: int, state: TrainState, last: bool) -> None:
        """Look at the position before and after a step, and act if it is time."""


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


def fit(
    state: TrainState,
    windows: Iterable[Window],
    parts: StepParts,
    actions: list[Action],
    total: int,
    request: StopRequest,
) -> None:
    """Train until `total` samples have been seen or a stop is requested; the actions see the last step as such."""
    state.model.train()
    for window in windows:
        if state.samples >= total:
            break
        before = state.samples
        parts.synchronise.ask_to_stop(request.signal is not None)
        train_step(state, window, parts)
        last = state.samples >= total or parts.synchronise.stop_agreed
        for action in actions:
            action.after(before, state, last)
        if last:
            break
