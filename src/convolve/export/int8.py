"""Int8 exports: quantize, then measure the accuracy of every engine that may run the file on all test images."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from convolve.data.build import DataModule
from convolve.engine.tasks import CORRECT
from convolve.errors import ConvolveError
from convolve.export.quantize import CALIBRATION_IMAGES, quantize, set_metadata
from convolve.export.reference import export_module, reference_predictor
from convolve.inference.engines.base import Engine, is_installed
from convolve.inference.engines.onnx import open_onnxruntime, open_openvino
from convolve.inference.engines.probe import Predictor
from convolve.inference.formats import write_export
from convolve.inference.metadata import ModelMetadata, metadata_of
from convolve.inference.openvino_ir import write_ir
from convolve.loggers.base import Console
from convolve.runs.load import TrainedModel, iter_test_batches, open_run_data, training_pixels

# Formats that can be quantized, and the engines that run them. The first one must not lose accuracy.
INT8_ENGINES = {"onnx": ("onnxruntime", "openvino"), "openvino": ("openvino",)}
_OPENERS: dict[str, Callable[[Path, int], Engine]] = {"onnxruntime": open_onnxruntime, "openvino": open_openvino}


@dataclass(frozen=True)
class Int8Accuracy:
    """Accuracy of a model and, on each engine, of its int8 version, on `samples` test images."""

    model: float
    engines: dict[str, float]
    samples: int


def quantize_export(name: str, draft: Path, trained: TrainedModel, max_loss: float, console: Console) -> Int8Accuracy:
    """Replace the draft of an export by its int8 version, with the accuracy of each engine in its metadata."""
    data, metadata = open_run_data(trained, console), metadata_of(trained)
    pixels = training_pixels(data, trained.config.run.seed, CALIBRATION_IMAGES)
    with tempfile.TemporaryDirectory(dir=draft.parent) as temporary:
        folder = Path(temporary)
        source, int8_file = draft if name == "onnx" else folder / "model.onnx", folder / "model-int8.onnx"
        if source != draft:
            write_export("onnx", export_module(trained, "onnx"), metadata, source)
        quantize(source, int8_file, metadata, pixels)
        _write(name, int8_file, metadata, draft)
        measured = _measure(_open_engines(name, draft), trained, data)
        usable = _usable_engines(name, measured, max_loss, console)
        quantization = {"float_accuracy": measured.model, "accuracies": usable, "test_samples": measured.samples}
        _write(name, int8_file, replace(metadata, quantization=quantization), draft)
    return replace(measured, engines=usable)


def _write(name: str, int8_file: Path, metadata: ModelMetadata, draft: Path) -> None:
    """Write the quantized graph in a format with the given metadata."""
    if name == "openvino":
        write_ir(int8_file, metadata, draft)
    else:
        draft.write_bytes(int8_file.read_bytes())
        set_metadata(draft, metadata)


def _open_engines(name: str, path: Path) -> dict[str, Predictor]:
    threads = torch.get_num_threads()
    return {engine: _OPENERS[engine](path, threads).run for engine in INT8_ENGINES[name] if is_installed(engine)}


def _usable_engines(name: str, measured: Int8Accuracy, max_loss: float, console: Console) -> dict[str, float]:
    """Return the engines that lose little accuracy; the first one of the format must be among them."""
    usable = {engine: value for engine, value in measured.engines.items() if measured.model - value <= max_loss}
    for engine in measured.engines.keys() - usable.keys():
        lost = measured.model - measured.engines[engine]
        console.info(f"int8 with {engine}: loses {lost:.2%} of accuracy, more than {max_loss:.2%}; not usable")
    first = INT8_ENGINES[name][0]
    if first not in usable:
        after = measured.engines[first]
        raise ConvolveError(
            f"--int8: loses {measured.model - after:.2%} of accuracy ({measured.model:.2%} to {after:.2%}), more "
            f"than --max-accuracy-loss {max_loss:g}; nothing was written; export without --int8"
        )
    return usable


def _measure(engines: Mapping[str, Predictor], trained: TrainedModel, data: DataModule) -> Int8Accuracy:
    """Classify all test images with the model and with the int8 file on every engine."""
    predictors = {"model": reference_predictor(trained), **engines}
    correct, count, is_correct = dict.fromkeys(predictors, 0), 0, CORRECT[trained.task]
    for pixels, labels in iter_test_batches(data):
        for name, predictor in predictors.items():
            logits = torch.from_numpy(np.ascontiguousarray(predictor(pixels)))
            correct[name] += int(is_correct(logits, torch.from_numpy(labels)).sum())
        count += len(labels)
    accuracies = {name: number / count for name, number in correct.items()}
    return Int8Accuracy(accuracies.pop("model"), accuracies, count)
