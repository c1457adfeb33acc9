"""Records in words and in JSON, the same wherever they are shown."""

import math
from collections.abc import Mapping
from datetime import datetime, timezone
from numbers import Integral, Real
from typing import Any

from convolve.report.records import TrainRecord, ValidRecord


def describe_train(record: TrainRecord) -> str:
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


def describe_valid(record: ValidRecord) -> str:
    """A validation as one line of text."""
    return (
        f"validation of {record.checkpoint}, epoch {record.epoch:.2f}, loss {record.loss:.4f}, "
        f"accuracy {record.accuracy:.2%} of {record.samples:,} images, "
        f"{record.seconds:.2f} s, {record.images_per_second:,.0f} images/s"
    )


def describe_event(kind: str, facts: Mapping[str, Any]) -> str:
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
