"""Callbacks of the loop: progress, loss scale, weight check, log, validate, save.

What is due is counted in samples, so it does not change with the batch size or after a restart.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from convolve.checkpoint.snapshot import Snapshot
from convolve.config import Config
from convolve.config.selection import SelectBy
from convolve.data.loader.loader import Loader
from convolve.distributed.collectives import require_equal_weights
from convolve.download import Progress, ignore_progress
from convolve.engine.ema import temporary_weights
from convolve.engine.evaluate import VALID_BATCH, EvalSetup, count_images, evaluate
from convolve.engine.loop import StepEvent
from convolve.engine.metrics import EvalResult
from convolve.engine.state import TrainState
from convolve.engine.step import StepParts
from convolve.engine.stopping import is_better
from convolve.errors import DivergedError
from convolve.loggers.base import Console, Logger, TrainRecord, ValidationRecord
from convolve.numerics.loss_scaling import Scaler
from convolve.run_files import checkpoint_name, step_of


@dataclass(frozen=True)
class IntervalTrigger:
    """Due at the end of the run, and whenever the position crosses a multiple of `every` samples (None: never)."""

    every: Fraction | None
    total: int

    def due(self, before: int, now: int) -> bool:
        """Return True if a multiple is in (before, now]."""
        if now >= self.total:
            return True
        if self.every is None:
            return False
        return bool(now // self.every > before // self.every)

    def due_at(self, event: StepEvent) -> bool:
        """Return True if a multiple was crossed in a step."""
        return self.due(event.samples_before, event.state.samples)


def log_trigger(config: Config, samples_per_epoch: int, total: int) -> IntervalTrigger:
    """Return when to log."""
    if config.log.log_freq is not None:
        return IntervalTrigger(Fraction(config.log.log_freq * config.global_batch_size), total)
    return IntervalTrigger(Fraction(samples_per_epoch, config.log.logs_per_epoch), total)


def save_trigger(config: Config, samples_per_epoch: int, total: int) -> IntervalTrigger:
    """Return when to save."""
    run = config.run
    if run.epochs_per_ckpt is not None:
        return IntervalTrigger(Fraction(run.epochs_per_ckpt * samples_per_epoch), total)
    return IntervalTrigger(Fraction(samples_per_epoch, run.ckpts_per_epoch) if run.ckpts_per_epoch else None, total)


@dataclass(frozen=True)
class ProgressCallback:
    """Shows the position."""

    console: Console
    total: int
    timed: bool = True

    def on_step_end(self, event: StepEvent) -> None:
        self.console.progress("train", event.state.samples, self.total)


class LossScaleCallback:
    """Logs skipped steps and changes of the loss scale."""

    timed = True

    def __init__(self, logger: Logger, scaler: Scaler) -> None:
        self._logger = logger
        self._scale, self._skipped = scaler.scale, scaler.skipped

    def on_step_end(self, event: StepEvent) -> None:
        scaler, step = event.state.scaler, event.state.step
        if scaler.skipped > self._skipped:
            self._logger.event("skipped_step", step=step, skipped=scaler.skipped, loss_scale=self._scale)
        if scaler.scale != self._scale:
            self._logger.event("loss_scale", step=step, loss_scale=scaler.scale)
        self._scale, self._skipped = scaler.scale, scaler.skipped


@dataclass(frozen=True, kw_only=True)
class WeightCheckCallback:
    """Checks that all replicas have the same weights."""

    trigger: IntervalTrigger
    parts: StepParts
    timed: bool = True

    def on_step_end(self, event: StepEvent) -> None:
        if self.trigger.due_at(event):
            require_equal_weights(self.parts.collectives, event.state.model)


@dataclass(kw_only=True)
class LogCallback:
    """Logs the metrics and the throughput since the last log point."""

    trigger: IntervalTrigger
    parts: StepParts
    loader: Loader
    logger: Logger
    final_loss: float = math.nan
    timed: bool = True

    def on_step_end(self, event: StepEvent) -> None:
        if not (event.last or self.trigger.due_at(event)):
            return
        result = self.parts.metrics.compute()
        if result.samples and not math.isfinite(result.loss):
            raise DivergedError(
                f"loss={result.loss} at step {event.state.step}: training has diverged; "
                "lower --learning-rate, add --warmup-epochs or --clip-norm"
            )
        self.final_loss = result.loss
        self.logger.train(self._record(event, result))

    def _record(self, event: StepEvent, result: EvalResult) -> TrainRecord:
        state, timer = event.state, event.timer
        interval = timer.split(step=state.step, samples=state.samples, waited_seconds=self.loader.waited_seconds)
        return TrainRecord(
            step=state.step,
            epoch=state.samples / len(self.loader),
            samples=state.samples,
            learning_rate=self.parts.schedule(event.samples_before),
            loss=result.loss if result.samples else None,
            accuracy=result.accuracy if result.samples else None,
            images_per_second=interval.images_per_second,
            ms_per_step=interval.ms_per_step,
            data_wait_share=interval.data_wait_share,
            total_seconds=timer.total_seconds,
            metrics=result.metrics,
        )


@dataclass(frozen=True, kw_only=True)
class ValidateCallback:
    """Evaluates the model, and its average if there is one, on the images that select the best checkpoint."""

    trigger: IntervalTrigger
    parts: StepParts
    loader: Loader
    samples_per_epoch: int
    logger: Logger
    config: Config
    timed: bool = False

    def on_step_end(self, event: StepEvent) -> None:
        """Validate if due, and after the last step within a time budget; an interrupted run does not wait for it."""
        if not (self.trigger.due_at(event) or event.stopped_early):
            return
        name = checkpoint_name(event.state.step)
        event.validation = self._validate(event, name)
        averages = event.state.ema.tensors()
        if averages:
            with temporary_weights(event.state.model, averages):
                averaged = self._validate(event, f"{name}-ema")
            run = self.config.run
            if run.select_ema and is_better(averaged, event.validation, run.select_by):
                event.validation, event.averaged = averaged, True

    def _validate(self, event: StepEvent, name: str) -> EvalResult:
        state, clock = event.state, event.timer.clock
        started = clock()
        result = evaluate_state(state, self.parts, self.loader, self.config)
        epoch = state.samples / self.samples_per_epoch
        self.logger.valid(validation_record(name, state.step, epoch, result, clock() - started))
        return result


def evaluate_state(
    state: TrainState,
    parts: StepParts,
    loader: Loader,
    config: Config,
    thresholds: Sequence[float] | None = None,
    progress: Progress = ignore_progress,
) -> EvalResult:
    """Evaluate the model of a run between two steps, on all ranks; thresholds of labels are fitted if not given."""
    size = config.optim.valid_batch_size or VALID_BATCH
    on_batch = count_images(progress, "evaluate", -(-len(loader) // parts.collectives.topology.replicas))
    setup = EvalSetup(config.run.validation_views, state.execution, parts.objective, thresholds, on_batch)
    return evaluate(state.model, loader, size, parts.collectives, parts.infer, setup)


def validation_record(checkpoint: str, step: int, epoch: float, result: EvalResult, seconds: float) -> ValidationRecord:
    """Return an evaluation as a record for the loggers."""
    return ValidationRecord(
        checkpoint=checkpoint,
        step=step,
        epoch=epoch,
        loss=result.loss,
        accuracy=result.accuracy,
        samples=result.samples,
        seconds=seconds,
        images_per_second=result.samples / seconds,
        metrics=result.metrics,
        labels=result.labels,
    )


def thresholds_of(result: EvalResult | None) -> dict[str, Any]:
    """Return the thresholds of several labels for a checkpoint; empty if images have one class."""
    return {"thresholds": [score.threshold for score in result.labels]} if result and result.labels else {}


class Saver(Protocol):
    """Saves snapshots in the background, on all ranks together."""

    def save(self, snapshot: Snapshot, *, best: bool) -> None:
        """Start to save the tensors of this rank."""

    def poll(self, *, wait: bool) -> Any:
        """Return the path of the last save once it completes, else None. Re-raises the error of a failed save."""


@dataclass(kw_only=True)
class SaveCallback:
    """Saves checkpoints and marks the one that validated best. `extra` returns further values to store.

    Files are written during the next steps. An error there ends the run one step after it is known.
    """

    trigger: IntervalTrigger
    parts: StepParts
    saver: Saver
    metadata: dict[str, Any]
    logger: Logger
    select_by: SelectBy
    best: EvalResult | None = None
    extra: Callable[[], dict[str, Any]] = dict
    timed: bool = False

    def on_step_end(self, event: StepEvent) -> None:
        """Save if due, and always after the last step, which waits for it."""
        self._log_saved(wait=False)
        if not (event.last or self.trigger.due_at(event)):
            return
        self._log_saved(wait=True)
        self._save(event)
        self._log_saved(wait=event.last)

    def _save(self, event: StepEvent) -> None:
        self.parts.verification.check(event.state)
        self.parts.verification.check_replicas(event.state, due=True)
        result = event.validation
        best = result is not None and is_better(result, self.best, self.select_by)
        if best:
            self.best = result
        metadata = {
            **self.metadata,
            "metrics": result.to_json() if result else {},
            "best_accuracy": -1.0 if self.best is None else self.best.accuracy,
            "best_validation": self.best.to_json() if self.best else {},
            **thresholds_of(result),
            "best": best,
            "averaged": event.averaged,
            "stopped_early": event.stopped_early,
            "seconds": event.timer.total_seconds,
            **self.extra(),
        }
        self.saver.save(event.state.snapshot(metadata, self.parts.collectives.topology), best=best)

    def _log_saved(self, *, wait: bool) -> None:
        path = self.saver.poll(wait=wait)
        if path is not None:
            self.logger.event("checkpoint", path=path.name, step=step_of(path))
