"""Validation of the checkpoints of a run, for `Run.validate` and `Run.validate_all`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from convolve.api.progress import open_progress
from convolve.api.session import session
from convolve.api.user_code import MetricLike, Source, locate, read_metrics
from convolve.errors import ConfigError
from convolve.inference.validation import logits_opener
from convolve.loggers.base import Console, ValidationRecord
from convolve.runs.validate import ValidateOptions, validate

if TYPE_CHECKING:
    from convolve.api.run import Run


def validate_run(
    run: Run,
    data: Source | None,
    checkpoint: str | None,
    options: ValidateOptions,
    *,
    metrics: Sequence[MetricLike],
    engine: str,
    progress: bool | Console | None,
) -> list[ValidationRecord]:
    """Evaluate one checkpoint, or without a name all of them."""
    if options.batch_size is not None and options.batch_size < 1:
        raise ConfigError(f"batch_size={options.batch_size}: must be at least 1")
    with session(), open_progress(progress) as console:
        path, place = run.path if checkpoint is None else run.checkpoint(checkpoint).path, locate(data)
        chosen = replace(
            options,
            every=checkpoint is None,
            data_dir=place.folder,
            open_logits=logits_opener(engine, console),
        )
        user = run._copy(data if place.is_object else None)
        if metrics:
            user = replace(user, metrics=read_metrics(metrics))
        return validate(path, console, chosen, user)
