"""Loggers that write CSV, JSON Lines and text to the run folder; opening all loggers; reading the tables back.

A restored run truncates its tables to the restored step, so they read like those of an uninterrupted run.
"""

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from convolve.config import LogConfig
from convolve.errors import ConvolveError
from convolve.files import open_run_file, read_run_file, write_file
from convolve.line_file import LineFile
from convolve.loggers.base import (
    Logger,
    LoggerGroup,
    RunInfo,
    TrainRecord,
    ValidationRecord,
    format_event,
    format_train,
    format_validation,
    timestamp,
    to_json,
)
from convolve.loggers.mlperf import MlperfLogger
from convolve.loggers.tensorboard import TensorBoardLogger
from convolve.loggers.wandb import WandbLogger
from convolve.run_files import EVENTS_FILE, LOG_FILE, TRAINING_FILE, VALIDATION_FILE, mlperf_name

Points = list[tuple[float, float]]


class CsvLogger(Logger):
    """Writes log points to training.csv and validations to validation.csv; None is an empty cell."""

    def __init__(
        self, training: LineFile, validation: LineFile, metrics: Sequence[str] = (), scores: Sequence[str] = ()
    ) -> None:
        self._training = training
        self._validation = validation
        self._metrics = tuple(metrics)
        self._scores = tuple(scores)

    @classmethod
    def open(cls, folder: Path, metrics: Sequence[str] = (), scores: Sequence[str] = ()) -> "CsvLogger":
        """Open both tables of a run folder to append to them. The user's metrics are their last columns, after the
        `scores` of validations."""
        training = _open_table(folder / TRAINING_FILE, TrainRecord, metrics)
        try:
            validation = _open_table(folder / VALIDATION_FILE, ValidationRecord, [*scores, *metrics])
            return cls(training, validation, metrics, scores)
        except ConvolveError:
            training.close()
            raise

    def train(self, record: TrainRecord) -> None:
        self._training.write(self._format(record, self._metrics))

    def valid(self, record: ValidationRecord) -> None:
        self._validation.write(self._format(record, (*self._scores, *self._metrics)))

    def _format(self, record: TrainRecord | ValidationRecord, metrics: Sequence[str]) -> str:
        cells = [getattr(record, name) for name in _columns(type(record))]
        return _row([*cells, *(record.metrics.get(name) for name in metrics)])

    def close(self) -> None:
        self._training.close()
        self._validation.close()


class JsonlLogger(Logger):
    """Writes everything to events.jsonl: one JSON object per line, each with `kind` and `time`."""

    def __init__(self, file: LineFile) -> None:
        self._file = file

    @classmethod
    def open(cls, folder: Path) -> "JsonlLogger":
        """Open events.jsonl of a run folder to append to it."""
        return cls(LineFile.open(folder / EVENTS_FILE))

    def start(self, run: RunInfo) -> None:
        self.event("start", **asdict(run))

    def train(self, record: TrainRecord) -> None:
        self.event("train", **asdict(record))

    def valid(self, record: ValidationRecord) -> None:
        self.event("valid", **asdict(record))

    def event(self, kind: str, **details: object) -> None:
        self._file.write(encode_event(kind, **details))

    def close(self) -> None:
        self._file.close()


class TextLogger(Logger):
    """Writes everything to log.txt as readable lines."""

    def __init__(self, file: LineFile) -> None:
        self._file = file

    @classmethod
    def open(cls, folder: Path) -> "TextLogger":
        """Open log.txt of a run folder to append to it."""
        return cls(LineFile.open(folder / LOG_FILE))

    def start(self, run: RunInfo) -> None:
        how = "starts" if run.restored_step is None else f"resumes from step {run.restored_step}"
        self._write(format_event(f"run {run.name} {how}", run.facts))

    def train(self, record: TrainRecord) -> None:
        self._write(format_train(record))

    def valid(self, record: ValidationRecord) -> None:
        self._write(format_validation(record))

    def event(self, kind: str, **details: object) -> None:
        self._write(format_event(kind, details))

    def close(self) -> None:
        self._file.close()

    def _write(self, text: str) -> None:
        self._file.write(f"{timestamp()}  {text}")


def open_loggers(
    config: LogConfig, folder: Path, seed: int = 0, metrics: Sequence[str] = (), scores: Sequence[str] = ()
) -> LoggerGroup:
    """Open the loggers of a config in a run folder; a missing extra is an error before any file is created.

    Args:
        metrics: names of the user's metrics, which become columns of the tables.
        scores: further columns of validations.
    """
    loggers: list[Logger] = []
    try:
        if config.tensorboard:
            loggers.append(TensorBoardLogger(folder))
        if config.wandb:
            loggers.append(WandbLogger(folder, config.wandb_project))
        if config.logs:
            loggers.append(CsvLogger.open(folder, metrics, scores))
            loggers.append(JsonlLogger.open(folder))
            loggers.append(TextLogger.open(folder))
        if config.mlperf_logging:
            loggers.append(MlperfLogger.open(folder / mlperf_name(seed)))
    except ConvolveError:
        LoggerGroup(loggers).close()
        raise
    return LoggerGroup(loggers)


def encode_event(kind: str, **details: object) -> str:
    """Return one line of events.jsonl."""
    return json.dumps({"kind": kind, "time": timestamp(), **to_json(details)}, allow_nan=False)


def _columns(record: type[TrainRecord] | type[ValidationRecord]) -> list[str]:
    return [field.name for field in fields(record) if field.name not in ("metrics", "labels")]


def _open_table(path: Path, record: type[TrainRecord] | type[ValidationRecord], metrics: Sequence[str]) -> LineFile:
    header = _row([*_columns(record), *metrics])
    file = LineFile.open(path)
    if file.empty:
        file.write(header)
        return file
    with open_run_file(path) as table:
        columns = table.readline().decode(errors="replace").rstrip("\r\n")
    if columns != header:
        file.close()
        raise ConvolveError(f"{path}: has the columns {columns!r}, but must have {header!r}; move the file away")
    return file


def _row(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


def truncate_after(folder: Path, step: int) -> None:
    """Remove the rows after a restored step from training.csv and validation.csv; note the restore in events.jsonl.

    Otherwise a restored run would log the steps since its last checkpoint twice. events.jsonl keeps everything. Call
    this before opening the loggers.
    """
    for name in (TRAINING_FILE, VALIDATION_FILE):
        _truncate_table(folder / name, step)
    if os.path.lexists(folder / EVENTS_FILE):
        events = LineFile.open(folder / EVENTS_FILE)
        events.write(encode_event("restored", step=step))
        events.close()


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table by column; none if the file does not exist."""
    try:
        with io.TextIOWrapper(open_run_file(path), encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, csv.Error) as error:
        raise ConvolveError(f"{path}: cannot read as a table ({error}); move the file away") from error


def read_points(path: Path, column: str) -> Points:
    """Return (epoch, value) pairs in order of epochs; empty cells and non-finite values are skipped."""
    points = []
    for number, row in enumerate(read_table(path), 2):
        if row.get(column) == "":
            continue
        try:
            points.append((float(row["epoch"]), float(row[column])))
        except (KeyError, TypeError, ValueError):
            raise ConvolveError(
                f"{path}: line {number} has no number for epoch or {column}; fix it or move the file away"
            ) from None
    return sorted(point for point in points if math.isfinite(point[1]))


def read_validations(folder: Path) -> list[ValidationRecord]:
    """Return the validations in validation.csv."""
    path = folder / VALIDATION_FILE
    try:
        return [
            ValidationRecord(
                checkpoint=row["checkpoint"],
                step=int(row["step"]),
                epoch=float(row["epoch"]),
                loss=float(row["loss"]),
                accuracy=float(row["accuracy"]),
                samples=int(row["samples"]),
                seconds=float(row["seconds"]),
                images_per_second=float(row["images_per_second"]),
                metrics=_read_metrics(row, ValidationRecord),
            )
            for row in read_table(path)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ConvolveError(f"{path}: a row is not a validation ({error}); fix it or move the file away") from None


def read_training(folder: Path) -> list[TrainRecord]:
    """Return the log points in training.csv."""
    path = folder / TRAINING_FILE
    try:
        return [_read_train(row) for row in read_table(path)]
    except (KeyError, TypeError, ValueError) as error:
        raise ConvolveError(f"{path}: a row is not a log point ({error}); fix it or move the file away") from None


def _read_train(row: dict[str, str]) -> TrainRecord:
    return TrainRecord(
        step=int(row["step"]),
        epoch=float(row["epoch"]),
        samples=int(row["samples"]),
        learning_rate=float(row["learning_rate"]),
        loss=float(row["loss"]) if row["loss"] else None,
        accuracy=float(row["accuracy"]) if row["accuracy"] else None,
        images_per_second=float(row["images_per_second"]),
        ms_per_step=float(row["ms_per_step"]),
        data_wait_share=float(row["data_wait_share"]),
        total_seconds=float(row["total_seconds"]),
        metrics=_read_metrics(row, TrainRecord),
    )


def _read_metrics(row: dict[str, str], record: type[TrainRecord] | type[ValidationRecord]) -> dict[str, float]:
    known = _columns(record)
    return {name: float(value) for name, value in row.items() if name not in known and value}


def _truncate_table(path: Path, step: int) -> None:
    if not os.path.lexists(path):
        return
    LineFile.open(path).close()  # removes an incomplete last line
    lines = read_run_file(path).splitlines(keepends=True)
    kept = lines[:1] + [line for line, row in zip(lines[1:], read_table(path), strict=True) if _step(path, row) <= step]
    if kept != lines:
        write_file(path, b"".join(kept))


def _step(path: Path, row: dict[str, str]) -> int:
    try:
        return int(row["step"])
    except (KeyError, ValueError, TypeError):
        raise ConvolveError(f"{path}: a row has no step: {row}; fix it or move the file away") from None
