"""Who writes a run down: a protocol, the fan-out to many writers, and the three that write plain files.

The tables of a run read back: to go on after a restore as if nothing had happened, and to see what is validated.
"""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, fields
from pathlib import Path

from convolve.config import LogConfig
from convolve.errors import ConvolveError
from convolve.files import LineFile, repair_lines, write_file
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


class CsvLogger:
    """Log points in training.csv and validations in validation.csv; None is an empty cell."""

    def __init__(self, folder: Path) -> None:
        self._training = _open_table(folder / TRAINING_FILE, TrainRecord)
        try:
            self._validation = _open_table(folder / VALIDATION_FILE, ValidationRecord)
        except ConvolveError:
            self._training.close()
            raise

    def start(self, run: RunInfo) -> None:
        """Tables have nothing to say about a start."""

    def train(self, record: TrainRecord) -> None:
        """Add a row to training.csv."""
        self._training.write(_row(astuple(record)))

    def valid(self, record: ValidationRecord) -> None:
        """Add a row to validation.csv."""
        self._validation.write(_row(astuple(record)))

    def event(self, kind: str, **facts: object) -> None:
        """Tables have no place for events."""

    def close(self) -> None:
        """Close both files."""
        self._training.close()
        self._validation.close()


class JsonlLogger:
    """Everything that happens in events.jsonl: one JSON object per line, with `kind` and `time` in each."""

    def __init__(self, folder: Path) -> None:
        self._file = LineFile.open(folder / EVENTS_FILE)

    def start(self, run: RunInfo) -> None:
        """Write who starts, with the whole config."""
        self.event("start", **asdict(run))

    def train(self, record: TrainRecord) -> None:
        """Write a log point with all its fields."""
        self.event("train", **asdict(record))

    def valid(self, record: ValidationRecord) -> None:
        """Write a validation with all its fields."""
        self.event("valid", **asdict(record))

    def event(self, kind: str, **facts: object) -> None:
        """Write an event with its facts."""
        self._file.write(encode_event(kind, **facts))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TextLogger:
    """Everything that happens in log.txt, as lines to read."""

    def __init__(self, folder: Path) -> None:
        self._file = LineFile.open(folder / LOG_FILE)

    def start(self, run: RunInfo) -> None:
        """Write which run it is and what is known about it."""
        how = "starts" if run.restored_step is None else f"goes on from step {run.restored_step}"
        self._say(format_event(f"run {run.name} {how}", run.facts))

    def train(self, record: TrainRecord) -> None:
        """Write a log point."""
        self._say(format_train(record))

    def valid(self, record: ValidationRecord) -> None:
        """Write a validation."""
        self._say(format_validation(record))

    def event(self, kind: str, **facts: object) -> None:
        """Write an event."""
        self._say(format_event(kind, facts))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _say(self, text: str) -> None:
        self._file.write(f"{timestamp()}  {text}")


def open_loggers(config: LogConfig, folder: Path, seed: int = 0) -> LoggerGroup:
    """The writers that a config asks for, in this run folder; a missing extra is told before any file is made."""
    opened: list[Logger] = []
    try:
        if config.tensorboard:
            opened.append(TensorBoardLogger(folder))
        if config.wandb:
            opened.append(WandbLogger(folder, config.wandb_project))
        for kind in (CsvLogger, JsonlLogger, TextLogger) if config.logs else ():
            opened.append(kind(folder))
        if config.mlperf_logging:
            opened.append(MlperfLogger(folder / mlperf_name(seed)))
    except ConvolveError:
        LoggerGroup(opened).close()
        raise
    return LoggerGroup(opened)


def encode_event(kind: str, **facts: object) -> str:
    """One line of events.jsonl."""
    return json.dumps({"kind": kind, "time": timestamp(), **to_json(facts)}, allow_nan=False)


def _open_table(path: Path, record: type[TrainRecord] | type[ValidationRecord]) -> LineFile:
    header = _row([field.name for field in fields(record)])
    file = LineFile.open(path)
    if file.empty:
        file.write(header)
        return file
    with path.open(encoding="utf-8") as table:
        found = table.readline().rstrip("\n")
    if found != header:
        file.close()
        raise ConvolveError(f"{path}: has the columns {found!r}, but {header!r} must follow; move the file away")
    return file


def _row(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


Points = list[tuple[float, float]]


def truncate_after(folder: Path, step: int) -> None:
    """Drop the rows after a restored step from training.csv and validation.csv, and note the restore in events.jsonl.

    Without it a run that is restored would write the steps between its last checkpoint and its end twice. events.jsonl
    keeps everything, so that what happened can still be seen there. To be called before the writers are opened.
    """
    for name in (TRAINING_FILE, VALIDATION_FILE):
        _truncate_table(folder / name, step)
    if (folder / EVENTS_FILE).exists():
        events = LineFile.open(folder / EVENTS_FILE)
        events.write(encode_event("restored", step=step))
        events.close()


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a table by column; a table that is not there has none."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, csv.Error) as error:
        raise ConvolveError(f"{path}: cannot be read as a table ({error}); move it away") from error


def read_points(path: Path, column: str) -> Points:
    """(epoch, value) in the order of epochs; empty cells and values that are not finite are left out."""
    points = []
    for number, row in enumerate(read_table(path), 2):
        if row.get(column) == "":
            continue
        try:
            points.append((float(row["epoch"]), float(row[column])))
        except (KeyError, TypeError, ValueError):
            raise ConvolveError(f"{path}: line {number} has no number for epoch or {column}; mend or move it") from None
    return sorted(point for point in points if math.isfinite(point[1]))


def read_validations(folder: Path) -> list[ValidationRecord]:
    """The validations in validation.csv."""
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
            )
            for row in read_table(path)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ConvolveError(f"{path}: a row is not a validation ({error}); mend it or move the file away") from None


def _truncate_table(path: Path, step: int) -> None:
    if not path.exists():
        return
    repair_lines(path)
    lines = path.read_bytes().splitlines(keepends=True)
    kept = lines[:1] + [line for line, row in zip(lines[1:], read_table(path), strict=True) if _step(path, row) <= step]
    if kept != lines:
        write_file(path, b"".join(kept))


def _step(path: Path, row: dict[str, str]) -> int:
    try:
        return int(row["step"])
    except (KeyError, ValueError, TypeError):
        raise ConvolveError(f"{path}: a row has no step: {row}; mend it or move the file away") from None
