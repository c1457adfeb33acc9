"""The figures of a finished run in summary.json: named once, checked, and with the unit in each key that has one."""

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
    "batch_size": "samples in one forward and backward pass",
    "device_type": "what the run computed on, as device and processor",
    "case_name": "network, batch size, replicas and kind of run in one word, see `case_name`",
    "images_per_second": "training speed, first log interval left out if first_excluded",
    "ms_per_step": "time of one weight update in milliseconds, over the same intervals",
    "first_excluded": "whether the first log interval is left out of both",
    "data_wait_included": "whether both count the time spent waiting for data",
    "test_accuracy": "share of 1 of the test images that are classified right",
    "test_samples": "test images that were counted",
    "final_loss": "training loss at the last log point",
    "end_to_end_seconds": "from the start of the command to its end, data and validation included",
}
"""Keys that every summary has; null stands for what a run did not measure."""

OPTIONAL: dict[str, str] = {
    "config": "name of the config",
    "dataset": "name of the data set that was used",
    "seed": "key of every random choice",
    "precision": "compute and master formats in bits",
    "numerics": "the policy, how it was carried out, and why that way",
    "skipped_steps": "steps that were not made because gradients were not finite",
    "parameters": "trainable numbers in the model",
    "global_batch_size": "samples per weight update",
    "replicas": "data-parallel copies of the model",
    "steps": "weight updates made",
    "epochs": "passes over the training data made",
    "samples": "training samples seen",
    "data_wait_share": "share of 1 of the training time spent waiting for data",
    "training_seconds": "time spent training, without data preparation and validation",
    "validation_seconds": "time spent validating",
    "test_loss": "mean loss over the test images",
    "best_accuracy": "share of 1, the best over all validations",
    "best_checkpoint": "name of the checkpoint with the best accuracy",
    "restores": "times the run was restored",
    "convolve_version": "version of convolve",
    "torch_version": "version of PyTorch",
}
"""Keys that a summary can have besides."""
_FRACTIONS = ("test_accuracy", "best_accuracy", "data_wait_share")


def write_summary(folder: Path, figures: Mapping[str, object]) -> Path:
    """Write summary.json and return its path; a missing, unknown or impossible figure is an error."""
    missing = [key for key in REQUIRED if key not in figures]
    if missing:
        raise ConvolveError(f"summary: {', '.join(missing)} missing; every run states them, null if not measured")
    known = {**REQUIRED, **OPTIONAL}
    for key, value in figures.items():
        if key not in known:
            raise ConvolveError(f"summary: {key} is not a known figure; {suggest(key, known)}")
        _check_figure(key, value)
    path = folder / SUMMARY_FILE
    ordered = {key: to_json(figures[key]) for key in known if key in figures}
    write_file(path, (json.dumps(ordered, indent=2, allow_nan=False) + "\n").encode())
    return path


def case_name(network: str, batch_size: int, replicas: int, kind: str) -> str:
    """The name of a case as model zoos write it: lenet5_bs64_1p_acc; `kind` is acc or perf."""
    return f"{network}_bs{batch_size}_{replicas}p_{kind}"


def _check_figure(key: str, value: object) -> None:
    if key in _FRACTIONS and isinstance(value, (int, float)) and math.isfinite(value) and not 0 <= value <= 1:
        raise ConvolveError(f"summary: {key}={value}: must be a share of 1, not a percentage; divide by 100")
