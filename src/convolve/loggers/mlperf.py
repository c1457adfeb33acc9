"""MLPerf log of a run, in result_SEED.txt: lines that the public checker (`mlperf_logging`) accepts.

The lines are those of image classification in the open division, where the submitter chooses model and data; the
checker's rulesets up to 4.0.0 have that benchmark, under the name `resnet`. A line is a prefix and a JSON object:

    :::MLLOG {"namespace": "", "time_ms": 1794800000000, "event_type": "POINT_IN_TIME", "key": "seed", "value": 0, ...}

Intervals come in pairs: init from the command to the first step, run from there to the end, a block of epochs between
validations, eval for a validation. Caches of the operating system are not cleared before a run; the log states this.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convolve.device import cpu_name
from convolve.line_file import LineFile
from convolve.loggers.base import Logger, RunInfo, TrainRecord, ValidationRecord, to_json

PREFIX = ":::MLLOG"
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


class MlperfLogger(Logger):
    """Writes the log. A restored run appends to it, so the run has one start and one stop."""

    def __init__(self, file: LineFile) -> None:
        self._file = file
        self._epochs = 1.0
        self._first_epoch = 0.0
        self._block_start: int | None = None

    @classmethod
    def open(cls, path: Path) -> "MlperfLogger":
        """Open a log to append to it."""
        return cls(LineFile.open(path))

    def start(self, run: RunInfo) -> None:
        during = run.config.get("validation_mode") == "during"
        self._epochs = float(run.config.get("validation_frequency" if during else "epochs") or 1)
        if run.restored_step is None:
            self._write_header(run)
        else:
            self._first_epoch = run.restored_step * run.facts["global_batch_size"] / run.facts["training_images"]
        self._block_start = _now()

    def _write_header(self, run: RunInfo) -> None:
        start = _now() - round(1000 * run.setup_seconds)
        points: dict[str, Any] = {**_SUBMISSION, "submission_platform": cpu_name(), "cache_clear": False}
        for key, value in points.items():
            self._write(POINT, key, value, when=start)
        self._write(START, "init_start", when=start)
        options = {key: run.config.get(option) for key, option in _OPTIONS.items()}
        sizes = {"train_samples": "training_images", "eval_samples": "test_images", "global_batch_size": None}
        for key, value in {**options, **{key: run.facts[name or key] for key, name in sizes.items()}}.items():
            self._write(POINT, key, value)
        self._write(STOP, "init_stop")
        self._write(START, "run_start")

    def train(self, record: TrainRecord) -> None:
        """Log no log points; the first one shows that another block of epochs has started."""
        self._write_block_start()

    def valid(self, record: ValidationRecord) -> None:
        """Log a validation, and the end of a block of epochs when the validation started."""
        self._write_block_start()
        metadata, start = {"epoch_num": record.epoch}, _now() - round(1000 * record.seconds)
        self._write(STOP, "block_stop", metadata={"first_epoch_num": self._first_epoch}, when=start)
        self._write(START, "eval_start", metadata=metadata, when=start)
        self._write(POINT, "eval_accuracy", record.accuracy, metadata)
        self._write(STOP, "eval_stop", metadata=metadata)
        self._first_epoch, self._block_start = record.epoch, _now()

    def event(self, kind: str, **details: object) -> None:
        """Log the end of the run, which is the event `end` with its `status`."""
        if kind == "end":
            if self._block_start is None:
                self._write(STOP, "block_stop", metadata={"first_epoch_num": self._first_epoch})
            self._write(STOP, "run_stop", metadata={"status": details["status"]})

    def close(self) -> None:
        self._file.close()

    def _write_block_start(self) -> None:
        """Write the start of the current block, once."""
        if self._block_start is not None:
            metadata = {"first_epoch_num": self._first_epoch, "epoch_count": self._epochs}
            self._write(START, "block_start", metadata=metadata, when=self._block_start)
            self._block_start = None

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
        self._file.write(f"{PREFIX} {json.dumps(line)}")


def _now() -> int:
    return round(1000 * time.time())
