"""Abstention: a prediction whose calibrated probability is below a threshold becomes `unknown`."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from convolve.inference.classifier import Prediction, PredictReport
from convolve.report.calibration import softmax

UNKNOWN = "unknown"


def apply_temperature(probabilities: Mapping[str, float], temperature: float) -> dict[str, float]:
    """Return the probabilities after dividing the logits by a temperature; their order stays."""
    logs = np.log(np.maximum(list(probabilities.values()), 1e-45))
    return dict(zip(probabilities, softmax(logs[np.newaxis], temperature)[0].tolist(), strict=True))


def abstain(report: PredictReport, threshold: float, temperature: float) -> PredictReport:
    """Return a report with calibrated probabilities in which unsure predictions are `unknown`."""
    return replace(report, predictions=[_decide(one, threshold, temperature) for one in report.predictions])


def _decide(prediction: Prediction, threshold: float, temperature: float) -> Prediction:
    calibrated = apply_temperature(prediction.probabilities, temperature)
    probability = calibrated[prediction.label]
    label = prediction.label if probability >= threshold else UNKNOWN
    return replace(prediction, label=label, labels=(label,), probability=probability, probabilities=calibrated)
