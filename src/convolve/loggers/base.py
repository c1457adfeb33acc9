"""What is measured at a log point and at a validation, and what a run is to those who write it down.

Records in words and in JSON, the same wherever they are shown.

Who writes a run down: a protocol, the fan-out to many writers, and the three that write plain files.

What the application says while it works; the command line renders it, a program may ignore it.

Writers that speak to other tools: TensorBoard and Weights & Biases, both behind the extra `logs`.

They are imported when a writer is made, so that a missing extra is told before training starts and nobody else waits
for them. Most events stay in events.jsonl: neither tool has a place for them.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol


@dataclass(frozen=True)
class TrainRecord:
    """One log point of training; means are over the steps since the log point before.

    `accuracy` and `data_wait_share` are shares of 1. With metrics switched off `loss` and `accuracy` are None.
    `total_seconds` counts from the start of training, over all restores.
    """

    step: int
    epoch: float
    samples: int
    learning_rate: float
    loss: float | None
    accuracy: float | None
    images_per_second: float
    ms_per_step: float
    data_wait_share: float
    total_seconds: float


@dataclass(frozen=True)
class ValidationRecord:
    """One validation; `checkpoint` is the name of its folder, `accuracy` a share of 1, `samples` the images counted."""

    checkpoint: str
    step: int
    epoch: float
    loss: float
    accuracy: float
    samples: int
    seconds: float
    images_per_second: float


@dataclass(frozen=True)
class RunInfo:
    """What the writers are told when a run starts or goes on.

    Args:
        config: every knob by its flat name, in plain types.
        facts: what else is worth a line at the top, such as network, parameters, device.
        restored_step: the step of the checkpoint that the run goes on from; None for a new run.
        setup_seconds: from the beginning of the preparations to now.
    """

    name: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    restored_step: int | None = None
    setup_seconds: float = 0.0


def format_train(record: TrainRecord) -> str:
    """A log point as one line of text."""
    parts = [f"step {record.step}", f"epoch {record.epoch:.2f}"]
    if record.loss is not None:
        parts.append(f"loss {record.loss:.4f}")
    if record.accuracy is not None:
        parts.append(f"accuracy {record.accuracy:.2%}")
    parts += [
        f"learning rate {record.learning_rate:.4g}",
        f"{record.images_per_second:,.0f} images/s",
        f"{record.ms_per_step:.2f} ms/step",
        f"waiting for data {record.data_wait_share:.0%}",
    ]
    return ", ".join(parts)


def format_validation(record: ValidationRecord) -> str:
    """A validation as one line of text."""
    return (
        f"validation of {record.checkpoint}, epoch {record.epoch:.2f}, loss {record.loss:.4f}, "
        f"accuracy {record.accuracy:.2%} of {record.samples:,} images, "
        f"{record.seconds:.2f} s, {record.images_per_second:,.0f} images/s"
    )


def format_event(kind: str, facts: Mapping[str, Any]) -> str:
    """An event as one line of text."""
    return ", ".join([kind, *(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())])


def to_json(value: Any) -> Any:
    """A value in the types that every JSON reader takes: numbers that are not finite become null, paths text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): to_json(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(inner) for inner in value]
    return str(value)


def timestamp() -> str:
    """Now, in UTC, as ISO 8601 with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class Logger(Protocol):
    """Something that a run tells what happens."""

    def start(self, run: RunInfo) -> None:
        """A run starts, or goes on from a checkpoint."""

    def train(self, record: TrainRecord) -> None:
        """A log point of training was reached."""

    def valid(self, record: ValidationRecord) -> None:
        """A validation is done."""

    def event(self, kind: str, **facts: object) -> None:
        """Anything else happened, such as a save; `kind` and `time` are not names of facts."""

    def close(self) -> None:
        """Nothing more will come."""


class LoggerGroup:
    """Many writers as one; with none of them it is what a run without logs has. Closes them as a context manager."""

    def __init__(self, writers: Sequence[Logger]) -> None:
        self._writers = tuple(writers)

    def start(self, run: RunInfo) -> None:
        """Tell all writers that a run starts."""
        for writer in self._writers:
            writer.start(run)

    def train(self, record: TrainRecord) -> None:
        """Tell all writers of a log point."""
        for writer in self._writers:
            writer.train(record)

    def valid(self, record: ValidationRecord) -> None:
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

    def __enter__(self) -> "LoggerGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Console(Protocol):
    """A writer of records that can also say a line and show progress."""

    def info(self, line: str) -> None:
        """One line for the user."""

    def progress(self, what: str, done: int, total: int | None) -> None:
        """How far a piece of work is; `total` is None where nobody knows."""

    def start(self, run: RunInfo) -> None:
        """A run begins."""

    def train(self, record: TrainRecord) -> None:
        """A log point of training."""

    def valid(self, record: ValidationRecord) -> None:
        """A validation."""

    def event(self, kind: str, **facts: object) -> None:
        """Anything else worth a line."""

    def close(self) -> None:
        """Nothing more comes."""


class SilentConsole:
    """Says nothing."""

    def info(self, line: str) -> None:
        """Drop the line."""

    def progress(self, what: str, done: int, total: int | None) -> None:
        """Drop the progress."""

    def start(self, run: RunInfo) -> None:
        """Drop the start."""

    def train(self, record: TrainRecord) -> None:
        """Drop the record."""

    def valid(self, record: ValidationRecord) -> None:
        """Drop the record."""

    def event(self, kind: str, **facts: object) -> None:
        """Drop the event."""

    def close(self) -> None:
        """Nothing to close."""


def _figures(record: TrainRecord | ValidationRecord) -> dict[str, float]:
    """The numbers of a record that make a curve over the step."""
    skipped = {"step", "checkpoint"}
    return {name: value for name, value in asdict(record).items() if name not in skipped and value is not None}
