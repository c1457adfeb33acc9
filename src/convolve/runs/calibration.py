"""Temperature of a run: the number that, dividing its logits, makes its probabilities match its accuracy.

Training fits it on the images that select the best checkpoint and stores it in the run folder, so probabilities can be
calibrated without the data. `convolve report` does the same for a run without it:

    p_i = softmax(logits / T)_i = softmax(log(q) / T)_i    for the probabilities q of T = 1
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from convolve.data.build import DataModule
from convolve.download import Progress, ignore_progress
from convolve.engine.evaluate import eval_mode
from convolve.engine.tasks import class_numbers
from convolve.files import read_run_file, write_file
from convolve.models.network import Network
from convolve.numerics.execution import Execution
from convolve.report.calibration import fit_temperature
from convolve.report.predictions import TestPredictions
from convolve.run_files import CALIBRATION_FILE


@dataclass(frozen=True)
class RunCalibration:
    """Temperature of a run, and the number of images that it was fitted on."""

    temperature: float
    images: int


def fit_calibration(
    model: Network,
    data: DataModule,
    execution: Execution,
    predictions: TestPredictions | None,
    progress: Progress = ignore_progress,
) -> RunCalibration:
    """Fit the temperature of a model; `predictions` on the test split are used if it has no other."""
    if not len(data.dataset.validation or ()) and predictions is not None:
        return RunCalibration(fit_temperature(predictions.logits, predictions.labels), len(predictions.labels))
    logits, labels, loader, done = [], [], data.validation_loader(), 0
    with eval_mode(model):
        for batch in loader.batches(data.transform.pass_size):
            logits.append(execution.forward(model, batch.images).float().cpu().numpy())
            labels.append(class_numbers(batch.labels))
            done += len(batch.labels)
            progress("calibrate", done, len(loader))
    truth = np.concatenate(labels)
    return RunCalibration(fit_temperature(np.concatenate(logits), truth), len(truth))


def write_calibration(folder: Path, calibration: RunCalibration) -> None:
    """Store a calibration in a run folder."""
    write_file(folder / CALIBRATION_FILE, (json.dumps(asdict(calibration), indent=2) + "\n").encode())


def read_calibration(folder: Path) -> RunCalibration | None:
    """Return the calibration of a run; None if it has none or a damaged one."""
    try:
        found = json.loads(read_run_file(folder / CALIBRATION_FILE))
        calibration = RunCalibration(float(found["temperature"]), int(found["images"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return calibration if 0 < calibration.temperature < math.inf else None
