"""Figures of a run in summary.json: declared once and checked, with the unit in the key."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from convolve.errors import ConvolveError, suggest
from convolve.files import write_file
from convolve.loggers.base import to_json
from convolve.run_files import SUMMARY_FILE

REQUIRED: dict[str, str] = {
    "network": "name of the model",
    "batch_size": "samples of one forward and backward pass",
    "device_type": "type of the device",
    "case_name": "model, batch size, replicas and kind of run in one word, see `case_name`",
    "images_per_second": "training throughput, without the first log interval if first_excluded",
    "ms_per_step": "milliseconds per optimizer step, over the same intervals",
    "first_excluded": "true if the first log interval is not counted in either",
    "data_wait_included": "true if both count the time spent waiting for data",
    "test_accuracy": "accuracy on the test images, in [0, 1]",
    "test_samples": "number of test images",
    "final_loss": "training loss at the last log point",
    "end_to_end_seconds": "from opening the data to the end of validation, in this process; a resumed run counts from "
    "its restart; writing the summary, the plots and the report is not included",
}
"""Keys of every summary; null if a run did not measure it."""

OPTIONAL: dict[str, str] = {
    "dataset": "name of the data set",
    "precision": "name of the precision policy",
    "numerics": "the policy, how it was executed, and why",
    "skipped_steps": "steps skipped because gradients were not finite",
    "global_batch_size": "samples per optimizer step",
    "steps": "optimizer steps",
    "test_split": "what the data call the images of test_accuracy",
    "weights": "name, source, license and sha256 of the initial weights",
    "data_wait_share": "fraction of the training time spent waiting for data",
    "lost_guarantees": "guarantees that the user's code does not keep, with the reasons",
    "metrics": "the user's metrics on the test images, by name, and mean_average_precision with several labels",
    "labels": "with several labels: average precision, threshold, precision, recall and F1 of each on the test images",
}
"""Keys that a training run adds."""
_FRACTIONS = ("test_accuracy", "data_wait_share")


def write_summary(folder: Path, figures: Mapping[str, object]) -> Path:
    """Write summary.json and return its path. Raises on a missing, unknown or impossible figure."""
    missing = [key for key in REQUIRED if key not in figures]
    if missing:
        raise ConvolveError(f"summary: {', '.join(missing)} missing; write null if not measured")
    known = {**REQUIRED, **OPTIONAL}
    for key, value in figures.items():
        if key not in known:
            raise ConvolveError(f"summary: {key} is not a known figure; {suggest(key, known)}")
        _check_figure(key, value)
    path = folder / SUMMARY_FILE
    ordered = {key: to_json(figures[key]) for key in known if key in figures}
    write_file(path, (json.dumps(ordered, indent=2, allow_nan=False) + "\n").encode())
    return path


def case_name(model: str, batch_size: int, replicas: int, kind: str) -> str:
    """Return the name of a case as in model zoos, such as lenet5_bs64_1p_acc; `kind` is acc or perf."""
    return f"{model}_bs{batch_size}_{replicas}p_{kind}"


def _check_figure(key: str, value: object) -> None:
    if key in _FRACTIONS and isinstance(value, (int, float)) and math.isfinite(value) and not 0 <= value <= 1:
        raise ConvolveError(f"summary: {key}={value}: must be in [0, 1]; divide percentages by 100")
