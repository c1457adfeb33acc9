"""`convolve validate`: accuracy of stored checkpoints on all test images."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convolve import device
from convolve.checkpoint.averaging import list_averages
from convolve.checkpoint.store import find_checkpoints
from convolve.data.build import DataModule
from convolve.data.loader.loader import Loader
from convolve.download import Progress, ignore_progress
from convolve.engine.build import build_objective, match_training_numerics
from convolve.engine.callbacks import validation_record
from convolve.engine.evaluate import VALID_BATCH, EvalSetup, LogitsFn, count_images, evaluate
from convolve.engine.user_code import NO_USER_CODE, UserCode
from convolve.errors import ConfigError, to_one_line
from convolve.label_scores import DEFAULT_THRESHOLD
from convolve.loggers.base import Console, DetailedRecord, Logger, Outputs, ValidationRecord
from convolve.loggers.files import read_validations
from convolve.runs.load import TrainedModel, load_trained, open_run_data, open_scored_data

OpenLogits = Callable[[TrainedModel, int], LogitsFn]
"""Open another engine than torch for a batch size, as a function from images to logits."""


def validate_one(
    trained: TrainedModel,
    data: DataModule,
    loader: Loader | None = None,
    open_logits: OpenLogits | None = None,
    *,
    fit: bool = False,
    outputs: bool = False,
    progress: Progress = ignore_progress,
) -> ValidationRecord:
    """Evaluate one model on all images of a loader; by default, those that select.

    Labels are predicted at the thresholds of the checkpoint, or `fit` chooses them. With `outputs`, the record has all
    logits and targets.
    """
    started = time.perf_counter()
    size = trained.config.optim.valid_batch_size or VALID_BATCH
    # Engines export PyTorch's layers, so they are opened before native kernels replace some.
    logits_fn = None if open_logits is None else open_logits(trained, size)
    execution = match_training_numerics(trained.config, trained.model, data.device)
    if logits_fn is not None and not execution.foldable:
        raise ConfigError("--engine: this run computes in another number format than fp32; use --engine torch")
    objective = build_objective(trained.config, trained.user, trained.classes, task=trained.task)
    thresholds = trained.thresholds or (DEFAULT_THRESHOLD,) * len(trained.classes)
    loader = loader or data.validation_loader()
    count = count_images(progress, f"validate {trained.path.name}", len(loader))
    batches: list[tuple[Tensor, Tensor]] = []

    def on_batch(logits: Tensor, labels: Tensor) -> None:
        count(logits, labels)
        if outputs:
            batches.append((logits.float().cpu(), labels.cpu()))

    views = trained.config.run.validation_views
    setup = EvalSetup(views, execution, objective, None if fit else thresholds, on_batch)
    result = evaluate(trained.model, loader, size, logits_fn=logits_fn, setup=setup)
    seconds = time.perf_counter() - started
    record = validation_record(trained.path.name, trained.step, trained.epoch, result, seconds)
    return _with_outputs(record, batches) if outputs else record


def _with_outputs(record: ValidationRecord, batches: Sequence[tuple[Tensor, Tensor]]) -> DetailedRecord:
    logits, targets = (torch.cat(parts).numpy() for parts in zip(*batches, strict=True))
    return DetailedRecord(**vars(record), details=Outputs(logits, targets))


def validate_checkpoints(
    folder: Path, paths: list[Path], data: DataModule, writer: Logger, user: UserCode = NO_USER_CODE
) -> list[ValidationRecord]:
    """Validate checkpoints in order; those in the validation.csv of the run are not evaluated again."""
    done = {record.checkpoint: record for record in read_validations(folder)}
    records = []
    for path in paths:
        record = done.get(path.name)
        if record is None:
            record = validate_one(load_trained(path, user=user), data)
            writer.valid(record)
        records.append(record)
    return records


def _open_data(trained: TrainedModel, data_dir: Path | None, console: Console) -> DataModule:
    if data_dir is None:
        return open_run_data(trained, console, train=False)
    return open_scored_data(trained, data_dir, console)


@dataclass(frozen=True)
class ValidateOptions:
    """What to validate, on which data, and how.

    Args:
        every: every checkpoint of the run instead of the newest one.
        data_dir: any labeled folder; its test split is scored, or all of its images if it has no splits.
        batch_size: samples of one forward pass, if different from the config.
        outputs: whether records have logits and targets.
        open_logits: another engine than the one of training.
    """

    every: bool = False
    data_dir: Path | None = None
    batch_size: int | None = None
    outputs: bool = False
    open_logits: OpenLogits | None = None


DEFAULT_OPTIONS = ValidateOptions()


def validate(
    path: Path,
    console: Console,
    choice: ValidateOptions = DEFAULT_OPTIONS,
    user: UserCode = NO_USER_CODE,
) -> list[ValidationRecord]:
    """Validate the newest checkpoint of a run, one checkpoint, or every checkpoint in order."""
    paths = find_checkpoints(path)
    chosen = [*paths, *list_averages(path)] if choice.every else paths[-1:]
    options: dict[str, Any] = {} if choice.batch_size is None else {"valid_batch_size": choice.batch_size}
    records = []
    data: DataModule | None = None
    for checkpoint in chosen:
        trained = load_trained(checkpoint, user=user)
        trained = replace(trained, config=trained.config.replace(**options))
        if data is None:
            if trained.loss is not None and user.loss is None:
                console.info(f"loss {to_one_line(trained.loss)[:60]}: not given, so cross-entropy is shown; add --loss")
            device.configure(trained.config.run.threads)
            data = _open_data(trained, choice.data_dir, console)
        loader, outputs = data.test_loader(), choice.outputs
        record = validate_one(trained, data, loader, choice.open_logits, outputs=outputs, progress=console.progress)
        console.valid(record)
        records.append(record)
    return records
