"""Who writes a run down: a protocol, the fan-out to many writers, and the three that write plain files."""

import csv
import io
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, astuple, fields
from pathlib import Path
from types import TracebackType
from typing import Protocol

from convolve.config import LogConfig
from convolve.errors import ConvolveError
from convolve.report.lines import LineFile
from convolve.report.mlperf import MlperfWriter, result_file
from convolve.report.records import RunInfo, TrainRecord, ValidRecord
from convolve.report.services import TensorBoardWriter, WandbWriter
from convolve.report.wording import describe_event, describe_train, describe_valid, timestamp, to_json

TRAINING_FILE = "training.csv"
VALIDATION_FILE = "validation.csv"
EVENTS_FILE = "events.jsonl"
LOG_FILE = "log.txt"


class Writer(Protocol):
    """Something that a run tells what happens."""

    def start(self, run: RunInfo) -> None:
        """A run starts, or goes on from a checkpoint."""

    def train(self, record: TrainRecord) -> None:
        """A log point of training was reached."""

    def valid(self, record: ValidRecord) -> None:
        """A validation is done."""

    def event(self, kind: str, **facts: object) -> None:
        """Anything else happened, such as a save; `kind` and `time` are not names of facts."""

    def close(self) -> None:
        """Nothing more will come."""


class Writers:
    """Many writers as one; with none of them it is what a run without logs has. Closes them as a context manager."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = tuple(writers)

    def start(self, run: RunInfo) -> None:
        """Tell all writers that a run starts."""
        for writer in self._writers:
            writer.start(run)

    def train(self, record: TrainRecord) -> None:
        """Tell all writers of a log point."""
        for writer in self._writers:
            writer.train(record)

    def valid(self, record: ValidRecord) -> None:
        """Tell all writers of a validation."""
        for writer in self._writers:
            writer.valid(record)

    def event(self, kind: str, **facts: object) -> None:
        """Tell all writers of an event."""
        for writer in self._writers:
            writer.event(kind, **facts)

    def close(self) -> None:
        """Close all writers, also when one of them fails."""
        with ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)

    def __enter__(self) -> "Writers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class CsvWriter:
    """Log points in training.csv and validations in validation.csv; None is an empty cell."""

    def __init__(self, folder: Path) -> None:
        self._training = _open_table(folder / TRAINING_FILE, TrainRecord)
        try:
            self._validation = _open_table(folder / VALIDATION_FILE, ValidRecord)
        except ConvolveError:
            self._training.close()
            raise

    def start(self, run: RunInfo) -> None:
        """Tables have nothing to say about a start."""

    def train(self, record: TrainRecord) -> None:
        """Add a row to training.csv."""
        self._training.write(_row(astuple(record)))

    def valid(self, record: ValidRecord) -> None:
        """Add a row to validation.csv."""
        self._validation.write(_row(astuple(record)))

    def event(self, kind: str, **facts: object) -> None:
        """Tables have no place for events."""

    def close(self) -> None:
        """Close both files."""
        self._training.close()
        self._validation.close()


class JsonlWriter:
    """Everything that happens in events.jsonl: one JSON object per line, with `kind` and `time` in each."""

    def __init__(self, folder: Path) -> None:
        self._file = LineFile(folder / EVENTS_FILE)

    def start(self, run: RunInfo) -> None:
        """Write who starts, with the whole config."""
        self.event("start", **asdict(run))

    def train(self, record: TrainRecord) -> None:
        """Write a log point with all its fields."""
        self.event("train", **asdict(record))

    def valid(self, record: ValidRecord) -> None:
        """Write a validation with all its fields."""
        self.event("valid", **asdict(record))

    def event(self, kind: str, **facts: object) -> None:
        """Write an event with its facts."""
        self._file.write(encode_event(kind, **facts))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TextWriter:
    """Everything that happens in log.txt, as lines to read."""

    def __init__(self, folder: Path) -> None:
        self._file = LineFile(folder / LOG_FILE)

    def start(self, run: RunInfo) -> None:
        """Write which run it is and what is known about it."""
        how = "starts" if run.restored_step is None else f"goes on from step {run.restored_step}"
        self._say(describe_event(f"run {run.name} {how}", run.facts))

    def train(self, record: TrainRecord) -> None:
        """Write a log point."""
        self._say(describe_train(record))

    def valid(self, record: ValidRecord) -> None:
        """Write a validation."""
        self._say(describe_valid(record))

    def event(self, kind: str, **facts: object) -> None:
        """Write an event."""
        self._say(describe_event(kind, facts))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _say(self, text: str) -> None:
        self._file.write(f"{timestamp()}  {text}")


def open_writers(config: LogConfig, folder: Path, seed: int = 0) -> Writers:
    """The writers that a config asks for, in this run folder; a missing extra is told before any file is made."""
    opened: list[Writer] = []
    try:
        if config.tensorboard:
            opened.append(TensorBoardWriter(folder))
        if config.wandb:
            opened.append(WandbWriter(folder, config.wandb_project))
        for kind in (CsvWriter, JsonlWriter, TextWriter) if config.logs else ():
            opened.append(kind(folder))
        if config.mlperf_logging:
            opened.append(MlperfWriter(result_file(folder, seed)))
    except ConvolveError:
        Writers(opened).close()
        raise
    return Writers(opened)


def encode_event(kind: str, **facts: object) -> str:
    """One line of events.jsonl."""
    return json.dumps({"kind": kind, "time": timestamp(), **to_json(facts)}, allow_nan=False)


def _open_table(path: Path, record: type[TrainRecord] | type[ValidRecord]) -> LineFile:
    header = _row([field.name for field in fields(record)])
    file = LineFile(path)
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
