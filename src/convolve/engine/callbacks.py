"""What happens between steps: log, validate, save. Each action decides by its rhythm whether it is due.

When something is due. Everything is counted in samples, so a restart or another batch size keeps the beat.

Notes each change of the loss scale and each skipped step.

What happens between the steps of one run, and in which order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from convolve.checkpoint.store import AsyncSaver
from convolve.config import Config
from convolve.data.loader.loader import Loader
from convolve.distributed.collectives import Collectives, require_equal_weights
from convolve.engine.ema import temporary_weights
from convolve.engine.evaluate import LogitsFn, evaluate
from convolve.engine.loop import Callback
from convolve.engine.metrics import EvalResult, Metrics
from convolve.engine.state import TrainState
from convolve.engine.step import StepParts
from convolve.engine.throughput import Stopwatch, Timer
from convolve.errors import DivergedError
from convolve.loggers.base import Console, Logger, TrainRecord, ValidationRecord
from convolve.numerics.loss_scaling import Scaler
from convolve.optim.schedules import Schedule
from convolve.run_files import checkpoint_name, step_of


@dataclass(frozen=True)
class IntervalTrigger:
    """Due each time the position crosses a multiple of `every` samples, and at the end of the run; None: only there."""

    every: Fraction | None
    total: int

    def due(self, before: int, now: int) -> bool:
        """Whether a beat lies in (before, now]."""
        if now >= self.total:
            return True
        if self.every is None:
            return False
        return bool(now // self.every > before // self.every)


def never(total: int) -> IntervalTrigger:
    """No beat but the last."""
    return IntervalTrigger(None, total)


@dataclass
class LogCallback:
    """Reads the counters and hands a record to the writers."""

    rhythm: IntervalTrigger
    tally: Metrics
    schedule: Schedule
    loader: Loader
    writer: Logger
    clock: Timer
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

    def _record(self, before: int, state: TrainState, counts: EvalResult) -> TrainRecord:
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
class ValidateCallback:
    """Evaluates the live model on the test split."""

    rhythm: IntervalTrigger
    loader: Loader
    batch_size: int
    samples_per_epoch: int
    writer: Logger
    clock: Timer
    team: Collectives
    answer: LogitsFn | None = None
    views: int = 1
    newest: EvalResult | None = None

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
            self.writer.valid(validation_record(checkpoint_name(state.step), state.step, epoch, self.newest, seconds))
            self._validate_average(state, epoch)

    def _evaluate(self, state: TrainState) -> EvalResult:
        return evaluate(state.model, self.loader, self.batch_size, self.team, self.answer, self.views, state.arithmetic)

    def _validate_average(self, state: TrainState, epoch: float) -> None:
        """The running average, if one is kept, is validated as a network of its own."""
        averages = state.averager.tensors()
        if not averages:
            return
        watch = Stopwatch()
        with temporary_weights(state.model, averages):
            counts = self._evaluate(state)
        name = f"{checkpoint_name(state.step)}-ema"
        self.writer.valid(validation_record(name, state.step, epoch, counts, watch.seconds))

    def latest(self) -> EvalResult | None:
        """The validation of the step just made, if there was one."""
        return self.newest


def validation_record(checkpoint: str, step: int, epoch: float, counts: EvalResult, seconds: float) -> ValidationRecord:
    """An evaluation as a record for the writers."""
    return ValidationRecord(
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
class WeightCheckCallback:
    """Makes sure that all replicas still hold the same weights."""

    rhythm: IntervalTrigger
    team: Collectives

    def after(self, before: int, state: TrainState, last: bool) -> None:
        """Compare if it is time."""
        if self.rhythm.due(before, state.samples):
            require_equal_weights(self.team, state.model)


@dataclass
class SaveCallback:
    """Stores checkpoints, and remembers which one validated best. All processes hand in, the first one writes.

    Files are written while training goes on; whatever went wrong there ends the run at the step after it is known.
    """

    rhythm: IntervalTrigger
    saver: AsyncSaver
    facts: dict[str, Any]
    latest_validation: Callable[[], EvalResult | None]
    writer: Logger
    clock: Timer
    team: Collectives
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

    def save(self, state: TrainState, counts: EvalResult | None) -> None:
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
        if self.team.is_rank_zero:
            self.saver.save(snapshot, best=better)

    def _tell(self, *, wait: bool) -> None:
        """Note the checkpoint that was finished since the last time."""
        path = self.saver.poll(wait=wait)
        if path is not None:
            self.writer.event("checkpoint", path=path.name, step=step_of(path))


class LossScaleCallback:
    """Tells the writers when the scale changes or a step is skipped."""

    def __init__(self, writer: Logger, scaler: Scaler) -> None:
        self._writer = writer
        self._scale, self._skipped = scaler.scale, scaler.skipped

    def after(self, before: int, state: TrainState, last: bool) -> None:
        """Compare with what was told last."""
        scaler = state.scaler
        if scaler.skipped > self._skipped:
            self._writer.event("skipped_step", step=state.step, skipped=scaler.skipped, loss_scale=self._scale)
        if scaler.scale != self._scale:
            self._writer.event("loss_scale", step=state.step, loss_scale=scaler.scale)
        self._scale, self._skipped = scaler.scale, scaler.skipped


@dataclass
class Callbacks:
    """The actions of a run, and which of them the config asks for."""

    parts: StepParts
    always: list[Callback]
    log: LogCallback
    validate: ValidateCallback
    save: SaveCallback
    config: Config

    def in_order(self) -> list[Callback]:
        """Progress, log, validate, save: a checkpoint carries the validation of its own step."""
        chosen: list[Callback] = [*self.always, self.log]
        if self.config.run.validation_mode == "during":
            chosen.append(self.validate)
        if self.config.run.checkpoints:
            chosen.append(self.save)
        return chosen


@dataclass(frozen=True)
class ProgressCallback:
    """Shows how far a run is."""

    console: Console
    total: int

    def after(self, before: int, state: TrainState, last: bool) -> None:
        """Show how far the run is."""
        self.console.progress("train", state.samples, self.total)
