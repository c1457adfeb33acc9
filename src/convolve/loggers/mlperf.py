"""MLPerf's log of a training, in result_SEED.txt: lines that the public checker (`mlperf_logging`) takes.

The lines are those of image classification in the open division, whose network and data are the submitter's own; the
checker's rulesets up to 4.0.0 have that benchmark, under the name `resnet`. A line is a mark and a JSON object:

    :::MLLOG {"namespace": "", "time_ms": 1794800000000, "event_type": "POINT_IN_TIME", "key": "seed", "value": 0, ...}

Intervals come in pairs: init from the command to the first step, run from there to the end, a block of epochs between
validations, eval for a validation. Caches of the operating system are not cleared before a run, and the log says so.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convolve.device import cpu_name
from convolve.files import LineFile
from convolve.loggers.base import RunInfo, TrainRecord, ValidationRecord, to_json

MARK = ":::MLLOG"
POINT, START, STOP = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"

_SUBMISSION = {
    "submission_benchmark": "resnet",
    "submission_org": "unnamed",
    "submission_division": "open",
    "submission_status": "research",
}

_OPTIONS = {
    "seed": "seed",
    "gradient_accumulation_steps": "gradient_accumulation_count",
    "opt_name": "optimizer",
    "opt_base_learning_rate": "learning_rate",
    "opt_weight_decay": "weight_decay",
    "opt_learning_rate_warmup_epochs": "warmup_epochs",
    "model_bn_span": "bn_span",
}


class MlperfLogger:
    """Writes the log. After a restore it goes on where it was; the run then has its start and its stop once each."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile.open(path)
        self._epochs = 1.0
        self._first = 0.0
        self._waiting: int | None = None

    def start(self, run: RunInfo) -> None:
        """The submission, what is trained and how, and the end of the preparations."""
        during = run.config.get("validation_mode") == "during"
        self._epochs = float(run.config.get("validation_frequency" if during else "epochs") or 1)
        if run.restored_step is None:
            self._introduce(run)
        else:
            self._first = run.restored_step * run.facts["global_batch_size"] / run.facts["training_images"]
        self._waiting = _now()

    def _introduce(self, run: RunInfo) -> None:
        began = _now() - round(1000 * run.setup_seconds)
        points: dict[str, Any] = {**_SUBMISSION, "submission_platform": cpu_name(), "cache_clear": False}
        for key, value in points.items():
            self._write(POINT, key, value, when=began)
        self._write(START, "init_start", when=began)
        knobs = {key: run.config.get(knob) for key, knob in _OPTIONS.items()}
        facts = run.facts
        sizes = {"train_samples": "training_images", "eval_samples": "test_images", "global_batch_size": None}
        for key, value in {**knobs, **{key: facts[name or key] for key, name in sizes.items()}}.items():
            self._write(POINT, key, value)
        self._write(STOP, "init_stop")
        self._write(START, "run_start")

    def train(self, record: TrainRecord) -> None:
        """Log points are not part of the log, but the first one shows that another block of epochs has begun."""
        self._begin_block()

    def valid(self, record: ValidationRecord) -> None:
        """A block of epochs ended when the validation began."""
        self._begin_block()
        where, began = {"epoch_num": record.epoch}, _now() - round(1000 * record.seconds)
        self._write(STOP, "block_stop", metadata={"first_epoch_num": self._first}, when=began)
        self._write(START, "eval_start", metadata=where, when=began)
        self._write(POINT, "eval_accuracy", record.accuracy, where)
        self._write(STOP, "eval_stop", metadata=where)
        self._first, self._waiting = record.epoch, _now()

    def event(self, kind: str, **facts: object) -> None:
        """The end of the run is told by the event `end`, with its `status`."""
        if kind == "end":
            if self._waiting is None:
                self._write(STOP, "block_stop", metadata={"first_epoch_num": self._first})
            self._write(STOP, "run_stop", metadata={"status": facts["status"]})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _begin_block(self) -> None:
        """Write when the block began, if that is not written yet."""
        if self._waiting is not None:
            metadata = {"first_epoch_num": self._first, "epoch_count": self._epochs}
            self._write(START, "block_start", metadata=metadata, when=self._waiting)
            self._waiting = None

    def _write(
        self,
        kind: str,
        key: str,
        value: object = None,
        metadata: Mapping[str, object] | None = None,
        when: int | None = None,
    ) -> None:
        line = {
            "namespace": "",
            "time_ms": _now() if when is None else when,
            "event_type": kind,
            "key": key,
            "value": to_json(value),
            "metadata": to_json(metadata or {}),
        }
        self._file.write(f"{MARK} {json.dumps(line)}")


def _now() -> int:
    return round(1000 * time.time())
