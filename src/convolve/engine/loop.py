"""The training loop.

for each global batch, until the run is complete or a stop is requested:
    train_step
    callbacks: log, validate, save, if due

SIGINT, SIGTERM and SIGHUP (a lost terminal) stop a run after the current step. A step never crosses the end of an
epoch, so a number of steps is an exact number of samples.
"""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Protocol

from convolve.config import Config
from convolve.data.loader.loader import StepBatch
from convolve.engine.forward_backward import with_pace
from convolve.engine.metrics import EvalResult
from convolve.engine.pace import SlowStepNotice
from convolve.engine.state import TrainState
from convolve.engine.step import StepParts, train_step
from convolve.engine.throughput import Timer

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
DEFAULT_EPOCHS = 5.0


class StopRequest:
    """The signal or the reason that requested a stop, if there was one. May be set from any thread."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.reason: str | None = None

    @property
    def requested(self) -> bool:
        """True once the run must stop after the current step."""
        return self.signal is not None or self.reason is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; the second one ends the process immediately, except SIGHUP, which often comes twice."""
        name = signal.Signals(number).name
        if self.signal is not None and name != "SIGHUP":
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)


@contextmanager
def stop_on_signals(request: StopRequest | None = None) -> Iterator[StopRequest]:
    """Inside the block, signals set the request instead of ending the process; `nohup` still ignores SIGHUP.

    Only the main thread can handle signals. In another one, the block handles none.
    """
    request = request or StopRequest()
    in_main = threading.current_thread() is threading.main_thread()
    handled = [number for number in SIGNALS if in_main and signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, request) for number in handled}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_samples(config: Config, samples_per_epoch: int) -> int:
    """Return the length of the run in samples."""
    if config.optim.iterations is None:
        epochs = DEFAULT_EPOCHS if config.optim.epochs is None else config.optim.epochs
        return max(1, round(epochs * samples_per_epoch)) if epochs else 0
    return samples_after_steps(config.optim.iterations, config, samples_per_epoch)


def samples_after_steps(steps: int, config: Config, samples_per_epoch: int) -> int:
    """Return the position after a number of steps from the start."""
    steps_per_epoch = -(-samples_per_epoch // config.global_batch_size)
    epochs, rest = divmod(steps, steps_per_epoch)
    return epochs * samples_per_epoch + rest * config.global_batch_size


@dataclass
class StepEvent:
    """A finished step. The position moved from `samples_before` to `state.samples`.

    `last` is True for the last step of the run, complete or stopped; `stopped` if any process asked to stop.
    `validation` is the result for this step, set by the callback that validates; `averaged` if it is that of the
    averaged weights. A callback that ends the run early sets `last` and the reason.
    """

    state: TrainState
    samples_before: int
    last: bool
    stopped: bool
    timer: Timer
    validation: EvalResult | None = None
    averaged: bool = False
    stopped_early: str | None = None


class Callback(Protocol):
    """Runs between steps."""

    @property
    def timed(self) -> bool:
        """False if the time it takes is not training time."""

    def on_step_end(self, event: StepEvent) -> None:
        """Act on a step if it is due. Callbacks run in order and share the event."""


def announce_slow_steps(parts: StepParts, info: Callable[[str], None], samples: int, config: Config) -> StepParts:
    """Return the parts of a step that print the expected time if it is long; `samples` remain until the end."""
    notice = SlowStepNotice(info, -(-samples // config.global_batch_size))
    return replace(parts, forward_backward=with_pace(parts.forward_backward, notice))


def fit(
    state: TrainState,
    batches: Iterable[StepBatch],
    parts: StepParts,
    callbacks: Sequence[Callback],
    *,
    total: int,
    stop: StopRequest | None = None,
    timer: Timer | None = None,
) -> StepEvent | None:
    """Train until `total` samples have been seen or a stop is requested. Return the last step, None if there was none.

    All processes stop after the same step. The timer runs during steps and timed callbacks.
    """
    stop, timer, event = stop or StopRequest(), timer or Timer(), None
    state.model.train()
    parts.verification.record(state)
    for batch in batches:
        if state.samples >= total:
            break
        before = state.samples
        parts.collectives.positions.step = state.step + 1
        stopped = stop.requested
        stopped = parts.stop_votes.decide(stopped, train_step(state, batch, parts, stop=stopped))
        last = state.samples >= total or stopped
        event = StepEvent(state, before, last, stopped, timer)
        _run_callbacks(callbacks, event)
        if event.last:
            break
    if event and event.stopped:
        parts.collectives.any_rank(False)  # leave together, after the save: launchers end the others when one exits
    return event


def _run_callbacks(callbacks: Sequence[Callback], event: StepEvent) -> None:
    for callback in callbacks:
        if callback.timed:
            callback.on_step_end(event)
        else:
            with event.timer.paused():
                callback.on_step_end(event)
