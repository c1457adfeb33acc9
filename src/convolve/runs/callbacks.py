"""The callbacks of a run, in order: a checkpoint contains the validation of its step and the decision to stop."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convolve.engine.callbacks import (
    IntervalTrigger,
    LogCallback,
    LossScaleCallback,
    ProgressCallback,
    SaveCallback,
    ValidateCallback,
    WeightCheckCallback,
    save_trigger,
)
from convolve.engine.loop import Callback
from convolve.engine.stopping import EarlyStopCallback, TimeBudgetCallback
from convolve.errors import ConvolveError
from convolve.files import read_run_file
from convolve.run_files import RECIPE_FILE

if TYPE_CHECKING:
    from convolve.runs.session import Session


def build_callbacks(session: Session, log: LogCallback) -> list[Callback]:
    """Return the callbacks of a session."""
    config, parts, logger, span = session.config, session.parts, session.outputs.logger, session.span
    every = config.parallel.epochs_per_sync
    interval = Fraction(every) * span.epoch if every else None
    callbacks: list[Callback] = [
        ProgressCallback(session.console, span.total),
        LossScaleCallback(logger, session.state.scaler),
        WeightCheckCallback(trigger=IntervalTrigger(interval, span.total), parts=parts),
        log,
    ]
    if config.optim.minutes is not None:
        seconds = 60 * config.optim.minutes - reserved_seconds(session.outputs.folder)
        callbacks.append(
            TimeBudgetCallback(seconds=seconds, elapsed=session.elapsed_seconds, parts=parts, logger=logger)
        )
    if config.run.validation_mode == "during":
        callbacks.append(_validate(session))
    extra: dict[str, EarlyStopCallback] = {}
    if config.optim.patience is not None:
        extra["early_stop"] = EarlyStopCallback(
            patience=config.optim.patience, logger=logger, select_by=config.run.select_by
        )
        extra["early_stop"].load_state_dict(session.early_stop)
        callbacks.append(extra["early_stop"])
    if config.run.checkpoints:
        callbacks.append(_save(session, extra))
    return callbacks


def reserved_seconds(folder: Path) -> float:
    """Return the part of the time budget for what follows the last step, from the plan of the run; 0 without one."""
    try:
        seconds = float(json.loads(read_run_file(folder / RECIPE_FILE))["reserved_seconds"])
    except (OSError, ConvolveError, ValueError, KeyError, TypeError, RecursionError):
        return 0.0
    return seconds if math.isfinite(seconds) else 0.0


def _validate(session: Session) -> ValidateCallback:
    every = Fraction(session.config.run.validation_frequency) * session.span.epoch
    return ValidateCallback(
        trigger=IntervalTrigger(every, session.span.total),
        parts=session.parts,
        loader=session.data.validation_loader(),
        samples_per_epoch=session.span.epoch,
        logger=session.outputs.logger,
        config=session.config,
    )


def _save(session: Session, stopping: dict[str, EarlyStopCallback]) -> SaveCallback:
    def extra() -> dict[str, Any]:
        states = {name: callback.state_dict() for name, callback in stopping.items()}
        return {**states, "elapsed_seconds": session.elapsed_seconds(), **session.hooks.state()}

    return SaveCallback(
        trigger=save_trigger(session.config, session.span.epoch, session.span.total),
        parts=session.parts,
        saver=session.outputs.open_saver(),
        metadata=session.checkpoint_metadata(),
        logger=session.outputs.logger,
        select_by=session.config.run.select_by,
        best=session.best,
        extra=extra,
    )
