"""A trained model as the module to export, and as the function that exports are compared with."""

import numpy as np
import torch

from convolve.inference.engines.base import Logits, Pixels
from convolve.inference.engines.probe import Predictor
from convolve.inference.formats import FORMATS, ExportModule
from convolve.layers.fold import fold_batch_norms
from convolve.runs.load import TrainedModel


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
