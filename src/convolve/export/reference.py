"""A trained model as the module to export, and as the function that exports are compared with.

Sensitivity: the logits f(x) of most models change by about 1e-6 of the largest one if x changes by its last two bits.
After a few steps of training, running statistics can be far from those of the activations, which then grow from layer
to layer and saturate the gates. The same change of x gives other logits altogether. Such a model has no logits
to compare an export with, because the order of any sum changes them.
"""

import numpy as np
import torch

from convolve.inference.engines.base import Logits, Pixels
from convolve.inference.engines.probe import Predictor, relative_difference
from convolve.inference.formats import FORMATS, ExportModule
from convolve.layers.fold import fold_batch_norms
from convolve.runs.load import TrainedModel

LAST_BITS = 2.0**-22


def export_module(trained: TrainedModel, name: str) -> ExportModule:
    """Return the module to export: with folded batch norms if the format has a graph, else as trained."""
    model = fold_batch_norms(trained.model) if FORMATS[name].has_graph else trained.model
    return ExportModule(model, trained.transform)


def reference_predictor(trained: TrainedModel) -> Predictor:
    """Return the model as trained, as a function from pixels to logits."""

    def run(pixels: Pixels) -> Logits:
        with torch.inference_mode():
            logits = trained.model(trained.transform(torch.from_numpy(pixels)))
        return np.asarray(logits)

    return run


def rounding_sensitivity(trained: TrainedModel, pixels: Pixels) -> float:
    """Return how much the logits change if the input changes by its last two bits, as a fraction of the largest."""
    with torch.inference_mode():
        images = trained.transform(torch.from_numpy(pixels))
        logits, changed = trained.model(images), trained.model(images * (1 + LAST_BITS))
    return relative_difference(np.asarray(changed), np.asarray(logits))
