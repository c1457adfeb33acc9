"""The loop: the only place with rhythm.

for each global batch, until the run is complete or somebody asks to stop:
    train_step
    every action that is due: log, validate, save

Ctrl-C and SIGTERM end a run after the step under way, not in the middle of it.

How long a run is. A step never crosses the end of an epoch, so steps translate into samples exactly.
"""

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from convolve.config import Config
from convolve.data.loader.loader import StepBatch
from convolve.engine.state import TrainState
from convolve.engine.step import StepParts, train_step

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Which signal asked the run to stop, if any did."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take note; a second signal of the same run ends the process at once."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """While this is open, signals set the request instead of ending the process."""
    request = StopRequest()
    before = {number: signal.signal(number, request) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


DEFAULT_EPOCHS = 5.0


def run_samples(config: Config, samples_per_epoch: int) -> int:
    """The whole run in samples."""
    if config.optim.iterations is None:
        return max(1, round((config.optim.epochs or DEFAULT_EPOCHS) * samples_per_epoch))
    return samples_after_steps(config.optim.iterations, config, samples_per_epoch)


def samples_after_steps(steps: int, config: Config, samples_per_epoch: int) -> int:
    """The position after so many steps from the beginning."""
    steps_per_epoch = -(-samples_per_epoch // config.global_batch_size)
    epochs, rest = divmod(steps, steps_per_epoch)
    return epochs * samples_per_epoch + rest * config.global_batch_size


class Callback(Protocol):
    """Something that happens between steps."""

    def after(self, before: int, state: TrainState, last: bool) -> None:
        """Look at the position before and after a step, and act if it is time."""


def fit(
    state: TrainState,
    step_batches: Iterable[StepBatch],
    parts: StepParts,
    actions: list[Callback],
    total: int,
    request: StopRequest,
) -> bool:
    """Train until `total` samples have been seen or a process is asked to stop; return whether one was.

    All processes stop after the same step. The actions see it as the last one.
    """
    collectives, stop = parts.team, False
    state.model.train()
    for batch in step_batches:
        if state.samples >= total:
            break
        before = state.samples
        stop = request.signal is not None
        stop_votes = train_step(state, batch, parts, stop=stop)
        if collectives.topology.world > 1:
            stop = bool(collectives.sum_over_stages(stop_votes) > 0)
        last = state.samples >= total or stop
        for action in actions:
            action.after(before, state, last)
        if last:
            break
    return stop
