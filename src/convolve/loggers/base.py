"""Records of a run, their text and JSON forms, and the interfaces `Logger` and `Console`."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from convolve.label_scores import LabelScore


@dataclass(frozen=True)
class TrainRecord:
    """One log point of training; means are over the steps since the previous log point.

    `accuracy` and `data_wait_share` are in [0, 1]. `loss` and `accuracy` are None if metrics are disabled.
    `total_seconds` is the training time since the start of the run, over all restores. `metrics` are the user's.
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
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ValidationRecord:
    """One validation of `samples` images; `checkpoint` is the name of its folder, `accuracy` is in [0, 1].

    `metrics` are the user's. If images have several labels, they include the mean average precision, `labels` are the
    scores of each label, and an image counts as correct if all of its labels are right at a probability of one half.
    """

    checkpoint: str
    step: int
    epoch: float
    loss: float
    accuracy: float
    samples: int
    seconds: float
    images_per_second: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    labels: tuple["LabelScore", ...] = ()

    @property
    def mean_average_precision(self) -> float | None:
        """That of images with several labels; otherwise None."""
        return self.metrics.get("mean_average_precision")

    @property
    def outputs(self) -> "Outputs | None":
        """Logits and targets of all images, if they were requested; otherwise None."""
        return None


@dataclass(frozen=True, eq=False)
class Outputs:
    """Logits [N, classes] of the images of a validation in their order, and targets: classes [N], or [N, classes]."""

    logits: "npt.NDArray[np.float32]"
    targets: "npt.NDArray[Any]"


@dataclass(frozen=True)
class DetailedRecord(ValidationRecord):
    """A validation with its logits and targets."""

    details: Outputs | None = None

    @property
    def outputs(self) -> Outputs | None:
        return self.details


@dataclass(frozen=True)
class RunInfo:
    """Description of a run that starts or resumes.

    Args:
        config: every option by its flat name, in plain types.
        facts: further details for the first log line, such as model, parameters, device.
        restored_step: step of the restored checkpoint; None for a new run.
        setup_seconds: time from the start of the setup until now.
    """

    name: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    restored_step: int | None = None
    setup_seconds: float = 0.0


def format_train(record: TrainRecord) -> str:
    """Return a log point as one line of text."""
    parts = [f"step {record.step}", f"epoch {record.epoch:.2f}"]
    if record.loss is not None:
        parts.append(f"loss {record.loss:.4f}")
    if record.accuracy is not None:
        parts.append(f"accuracy {record.accuracy:.2%}")
    parts += [*_format_metrics(record.metrics)]
    parts += [
        f"learning rate {record.learning_rate:.4g}",
        f"{record.images_per_second:,.0f} images/s",
        f"{record.ms_per_step:.2f} ms/step",
        f"waiting for data {record.data_wait_share:.0%}",
    ]
    return ", ".join(parts)


def format_validation(record: ValidationRecord) -> str:
    """Return a validation as one line of text."""
    return (
        f"validation of {record.checkpoint}, epoch {record.epoch:.2f}, loss {record.loss:.4f}, "
        f"accuracy {record.accuracy:.2%} of {record.samples:,} images, "
        f"{''.join(f'{part}, ' for part in _format_metrics(record.metrics))}"
        f"{record.seconds:.2f} s, {record.images_per_second:,.0f} images/s"
    )


def _format_metrics(metrics: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in metrics.items()]


def format_event(kind: str, details: Mapping[str, Any]) -> str:
    """Return an event as one line of text."""
    return ", ".join([kind, *(f"{name.replace('_', ' ')} {value}" for name, value in details.items())])


def scalars(record: TrainRecord | ValidationRecord) -> dict[str, float]:
    """Return the numbers of a record that can be plotted over the step."""
    skipped = {"step", "checkpoint", "metrics", "labels"}
    numbers = {name: value for name, value in asdict(record).items() if name not in skipped and value is not None}
    return {**numbers, **record.metrics}


def to_json(value: Any) -> Any:
    """Convert a value to standard JSON types: non-finite numbers become null, paths strings."""
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
    """Return the current time in UTC as ISO 8601 with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class Logger(Protocol):
    """Interface of a run logger; subclasses inherit methods that do nothing."""

    def start(self, run: RunInfo) -> None:
        """Log that a run starts or resumes."""
        return

    def train(self, record: TrainRecord) -> None:
        """Log a log point of training."""
        return

    def valid(self, record: ValidationRecord) -> None:
        """Log a validation."""
        return

    def event(self, kind: str, **details: object) -> None:
        """Log any other event, such as a save; `kind` and `time` are reserved names."""
        return

    def close(self) -> None:
        """Flush and close; nothing is logged afterwards."""
        return


class LoggerGroup(Logger):
    """Forwards to several loggers, or to none; closes them as a context manager."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = tuple(loggers)

    def start(self, run: RunInfo) -> None:
        for logger in self._loggers:
            logger.start(run)

    def train(self, record: TrainRecord) -> None:
        for logger in self._loggers:
            logger.train(record)

    def valid(self, record: ValidationRecord) -> None:
        for logger in self._loggers:
            logger.valid(record)

    def event(self, kind: str, **details: object) -> None:
        for logger in self._loggers:
            logger.event(kind, **details)

    def close(self) -> None:
        """Close all loggers even if one of them fails."""
        with ExitStack() as stack:
            for logger in self._loggers:
                stack.callback(logger.close)

    def __enter__(self) -> "LoggerGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Console(Logger, Protocol):
    """Interface of the output for the user: a logger that also prints lines and progress."""

    def info(self, line: str) -> None:
        """Print one line."""
        return

    def progress(self, task: str, done: int, total: int | None, /) -> None:
        """Show the progress of a task; `total` is None if it is unknown."""
        return


class SilentConsole(Console):
    """Prints nothing."""
