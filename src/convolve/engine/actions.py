"""What happens between steps: log, validate, save. Each action decides by its rhythm whether it is due."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from convolve.checkpoint.background import BackgroundSaver
from convolve.checkpoint.store import step_of
from convolve.data.loader import Loader
from convolve.engine.averager import showing
from convolve.engine.evaluation import evaluate
from convolve.engine.loop import Stopwatch
from convolve.engine.rhythm import Rhythm
from convolve.engine.state import TrainState
from convolve.engine.tally import Counts, Tally
from convolve.engine.views import Answer
from convolve.errors import DivergedError
from convolve.optim.schedules import Schedule
from convolve.parallel.team import Team
from convolve.report.records import TrainRecord, ValidRecord
from convolve.report.throughput import Interval, Throughput
from convolve.report.writers import Writer


@dataclass
class Clock:
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


@dataclass
class LogAction:
    """Reads the counters and hands a record to the writers."""

    rhythm: Rhythm
    tally: Tally
    schedule: Schedule
    loader: Loader
    writer: Writer
    clock: Clock
    final_loss: float = math.nan

    def after(self, before: int, state: TrainState, last: bool) -> None:
        """Log if it is time."""
        if not (last or self.rhythm.due(before, state.samples)):
            return
        counts = self.tally.read()
        if counts.samples and not math.isfinite(counts.loss):
            raise DivergedError(
                f"loss={counts.loss} at step {state.step}: training has diverged; "
                "lower --learning-rate, add --warmup-epochs or --clip-norm"
            )
        self.final_loss = counts.loss
        self.writer.train(self._record(before, state, counts))

    def _record(self, before: int, state: TrainState, counts: Counts) -> TrainRecord:
        clock = self.clock
        interval = clock.lap(state, self.loader.waited_seconds)
        return TrainRecord(
            step=state.step,
            epoch=state.samples / len(self.loader),
            samples=state.samples,
            learning_rate=self.schedule(before),
            loss=counts.loss if counts.samples else None,
            accuracy=counts.accuracy if counts.samples else None,
            images_per_second=clock.throughput.speed_of(interval),
            ms_per_step=clock.throughput.step_time_of(interval),
            data_wait_share=interval.data_wait_share,
            total_seconds=clock.earlier + clock.seconds,
        )


@dataclass
class ValidateAction:
    """Evaluates the live model on the test split."""

    rhythm: Rhythm
    loader: Loader
    batch_size: int
    samples_per_epoch: int
    writer: Writer
    clock: Clock
    team: Team
    answer: Answer | None = None
    views: int = 1
    newest: Counts | None = None

    def after(self, before: int, state: TrainState, last: bool) -> None:
        """Validate if it is time; an interrupted run does not wait for it."""
        self.newest = None
        if not self.rhythm.due(before, state.samples):
            return
        with self.clock.stopwatch.paused():
            watch = Stopwatch()
            self.newest = self._evaluate(state)
            seconds = watch.seconds
            epoch = state.samples / self.samples_per_epoch
            self.writer.valid(valid_record(checkpoint_name(state.step), state.step, epoch, self.newest, seconds))
            self._validate_average(state, epoch)

    def _evaluate(self, state: TrainState) -> Counts:
        return evaluate(state.model, self.loader, self.batch_size, self.team, self.answer, self.views)

    def _validate_average(self, state: TrainState, epoch: float) -> None:
        """The running average, if one is kept, is validated as a network of its own."""
        averages = state.averager.tensors()
        if not averages:
            return
        watch = Stopwatch()
        with showing(state.model, averages):
            counts = self._evaluate(state)
        name = f"{checkpoint_name(state.step)}-ema"
        self.writer.valid(valid_record(name, state.step, epoch, counts, watch.seconds))

    def latest(self) -> Counts | None:
        """The validation of the step just made, if there was one."""
        return self.newest


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint of one step."""
    return f"step-{step:09d}"


def valid_record(checkpoint: str, step: int, epoch: float, counts: Counts, seconds: float) -> ValidRecord:
    """An evaluation as a record for the writers."""
    return ValidRecord(
        checkpoint=checkpoint,
        step=step,
        epoch=epoch,
        loss=counts.loss,
        accuracy=counts.accuracy,
        samples=counts.samples,
        seconds=seconds,
        images_per_second=counts.samples / seconds,
    )


@dataclass
class SyncAction:
    """Makes sure that all replicas still hold the same weights."""

    rhythm: Rhythm
    team: Team

    def after(self, before: int, state: TrainState, last: bool) -> None:
        """Compare if it is time."""
        if self.rhythm.due(before, state.samples):
            self.team.require_equal_weights(state.model)


@dataclass
class SaveAction:
    """Stores checkpoints, and remembers which one validated best. All processes hand in, the first one writes.

    Files are written while training goes on; whatever went wrong there ends the run at the step after it is known.
    """

    rhythm: Rhythm
    saver: BackgroundSaver
    facts: dict[str, Any]
    latest_validation: Callable[[], Counts | None]
    writer: Writer
    clock: Clock
    team: Team
    best_accuracy: float = -1.0

    def after(self, before: int, state: TrainState, last: bool) -> None:
        """Save if it is time, and always at the last step, which waits for it."""
        self._tell(wait=False)
        if not (last or self.rhythm.due(before, state.samples)):
            return
        with self.clock.stopwatch.paused():
            self._tell(wait=True)
            self.save(state, self.latest_validation())
            self._tell(wait=last)

    def save(self, state: TrainState, counts: Counts | None) -> None:
        """Begin to store the state as it is now."""
        better = counts is not None and counts.accuracy > self.best_accuracy
        if counts is not None and better:
            self.best_accuracy = counts.accuracy
        metrics = (
            {} if counts is None else {"loss": counts.loss, "accuracy": counts.accuracy, "samples": counts.samples}
        )
        seconds = self.clock.earlier + self.clock.stopwatch.seconds
        facts = {
            **self.facts,
            "metrics": metrics,
            "best_accuracy": self.best_accuracy,
            "best": better,
            "seconds": seconds,
        }
        snapshot = state.snapshot(facts, self.team)
        if self.team.first:
            self.saver.begin(snapshot, best=better)

    def _tell(self, *, wait: bool) -> None:
        """Note the checkpoint that was finished since the last time."""
        path = self.saver.finished(wait=wait)
        if path is not None:
            self.writer.event("checkpoint", path=path.name, step=step_of(path))
