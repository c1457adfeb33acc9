"""Abstention: a prediction whose calibrated probability is below a threshold becomes `unknown`."""

import math
from collections.abc import Mapping
from dataclasses import replace

from convolve.inference.classifier import Prediction, PredictReport

UNKNOWN = "unknown"


def apply_temperature(probabilities: Mapping[str, float], temperature: float) -> dict[str, float]:
    """Return the probabilities after dividing the logits by a temperature; their order stays."""
    logs = {name: math.log(max(value, 1e-45)) / temperature for name, value in probabilities.items()}
    highest = max(logs.values())
    weights = {name: math.exp(value - highest) for name, value in logs.items()}
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def abstain(report: PredictReport, threshold: float, temperature: float) -> PredictReport:
    """Return a report with calibrated probabilities in which unsure predictions are `unknown`."""
    return replace(report, predictions=[_decide(one, threshold, temperature) for one in report.predictions])


def _decide(prediction: Prediction, threshold: float, temperature: float) -> Prediction:
    calibrated = apply_temperature(prediction.probabilities, temperature)
    probability = calibrated[prediction.label]
    label = prediction.label if probability >= threshold else UNKNOWN
    return replace(prediction, label=label, probability=probability, probabilities=calibrated)
