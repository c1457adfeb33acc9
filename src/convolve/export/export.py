"""`convolve export`: write a trained model as a file for other programs, and verify it before it is saved.

The file is written as a draft, opened again and run at batch sizes 1, 2 and 7. Its logits must match those of
the model to 1e-4 of the largest logit; weights without a graph must match exactly. Otherwise the draft is deleted.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from convolve import device
from convolve.checkpoint.store import choose_checkpoint
from convolve.data.build import DataModule
from convolve.engine.user_code import NO_USER_CODE, UserCode
from convolve.errors import ConfigError, ConvolveError, suggest
from convolve.export.quantize import CALIBRATION_IMAGES, quantize, set_metadata
from convolve.files import atomic_file
from convolve.inference.engines.base import Logits, Pixels, is_installed
from convolve.inference.engines.onnx import open_onnxruntime, open_openvino
from convolve.inference.engines.probe import TOLERANCE, Predictor, VerifyResult, compare, sample_pixels
from convolve.inference.formats import (
    FORMATS,
    ExportModule,
    open_export,
    read_weights,
    write_export,
)
from convolve.inference.metadata import ModelMetadata, metadata_of
from convolve.layers.fold import fold_batch_norms
from convolve.loggers.base import Console
from convolve.run_files import CHECKPOINTS_FOLDER, export_name
from convolve.runs.load import (
    TrainedModel,
    iter_test_batches,
    load_trained,
    open_run_data,
    training_pixels,
)

ALIASES = {"frozen": "onnx"}
MAX_INT8_LOSS = 0.01


@dataclass(frozen=True)
class ExportReport:
    """Result of an export. Accuracies are in [0, 1], measured on `test_samples` images, for int8 only.

    `int8_accuracy` is that of onnxruntime, `int8_accuracies` that of each engine that may run the file.
    """

    path: Path
    format: str
    bytes: int
    seconds: float
    batches: tuple[int, ...]
    largest_difference: float
    int8: bool = False
    accuracy: float | None = None
    int8_accuracy: float | None = None
    test_samples: int = 0
    int8_accuracies: Mapping[str, float] = field(default_factory=dict)

    def __fspath__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class Int8Accuracy:
    """Accuracy of a model and, on each engine, of its int8 version, on `samples` test images."""

    model: float
    engines: dict[str, float]
    samples: int


def export(
    path: Path,
    name: str,
    console: Console,
    *,
    output: Path | None = None,
    int8: bool = False,
    max_accuracy_loss: float = MAX_INT8_LOSS,
    user: UserCode = NO_USER_CODE,
) -> ExportReport:
    """Export a checkpoint, or the best checkpoint of a run, in the named format.

    Args:
        max_accuracy_loss: for int8, the largest loss of accuracy on the test images, in [0, 1].
    """
    start = time.perf_counter()
    name = _check_format(name, int8, output)
    if not 0 <= max_accuracy_loss <= 1:
        raise ConfigError(f"--max-accuracy-loss {max_accuracy_loss:g}: must be 0 to 1; 0.01 is one point")
    checkpoint = choose_checkpoint(path)
    trained = load_trained(checkpoint, device_name="cpu", user=user)
    device.configure(trained.config.run.threads)
    target = output or _default_target(checkpoint, name, int8)
    console.info(f"Exporting {trained.config.model.model} of {checkpoint} as {name}{' (int8)' if int8 else ''}")
    metadata = metadata_of(trained)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as draft:
            write_export(name, export_module(trained, name), metadata, draft)
            verified = _verify(name, draft, trained, target)
            measured = _quantize(draft, trained, metadata, max_accuracy_loss, console) if int8 else None
    except OSError as error:
        raise ConvolveError(f"{target}: cannot write ({error.strerror}); choose another --output") from error
    seconds = time.perf_counter() - start
    size = target.stat().st_size
    report = ExportReport(target, name, size, seconds, verified.batches, verified.largest_difference, int8)
    if measured is None:
        return report
    return replace(
        report,
        accuracy=measured.model,
        int8_accuracy=measured.engines["onnxruntime"],
        test_samples=measured.samples,
        int8_accuracies=measured.engines,
    )


def _check_format(name: str, int8: bool, output: Path | None) -> str:
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        raise ConfigError(f"--format {name}: unknown format; {suggest(name, [*FORMATS, *ALIASES])}")
    if int8 and name != "onnx":
        raise ConfigError(f"--int8 with --format {name}: only ONNX supports int8; use --format onnx")
    if name == "aoti" and output is not None and output.suffix != ".pt2":
        raise ConfigError(f"--output {output}: torch loads AOTInductor packages only if they end in .pt2; rename it")
    return name


def _default_target(checkpoint: Path, name: str, int8: bool) -> Path:
    """Return a path in the run folder, or beside a checkpoint outside any run."""
    folder = checkpoint.resolve().parent
    run_folder = folder.parent if folder.name == CHECKPOINTS_FOLDER else folder
    return run_folder / export_name(FORMATS[name].suffix, int8=int8)


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


def require_equal(result: VerifyResult, subject: str) -> None:
    """Reject an export whose logits differ from those of the model."""
    if not result.largest_difference <= TOLERANCE:
        raise ConvolveError(
            f"{subject}: logits differ from the model's by {result.largest_difference:.2g} of the largest, more than "
            f"{TOLERANCE:g}; nothing was written; try another --format"
        )


def _verify(name: str, draft: Path, trained: TrainedModel, target: Path) -> VerifyResult:
    if not FORMATS[name].has_graph:
        return _verify_weights(draft, trained, target)
    channels, height, width = trained.transform.shape
    predictor, _ = open_export(name, draft)
    result = compare(predictor, reference_predictor(trained), sample_pixels(height, width, channels))
    require_equal(result, str(target))
    return result


def _verify_weights(draft: Path, trained: TrainedModel, target: Path) -> VerifyResult:
    stored, _ = read_weights(draft)
    weights = trained.model.state_dict()
    if set(stored) != set(weights) or not all(torch.equal(stored[key], weights[key].cpu()) for key in weights):
        raise ConvolveError(f"{target}: stored weights differ from the model's; nothing was written")
    return VerifyResult((), 0.0, True)


def _quantize(
    draft: Path, trained: TrainedModel, metadata: ModelMetadata, max_loss: float, console: Console
) -> Int8Accuracy:
    """Replace the draft by its int8 version, with the accuracy of each engine in its metadata."""
    data = open_run_data(trained, console)
    int8_draft = draft.with_name(f"{draft.stem}-int8.onnx")
    try:
        quantize(draft, int8_draft, metadata, training_pixels(data, trained.config.run.seed, CALIBRATION_IMAGES))
        measured = _measure_int8(int8_draft, trained, data)
        usable = {name: value for name, value in measured.engines.items() if measured.model - value <= max_loss}
        for name in measured.engines.keys() - usable.keys():
            lost = measured.model - measured.engines[name]
            console.info(f"int8 with {name}: loses {lost:.2%} of accuracy, more than {max_loss:.2%}; not usable")
        if "onnxruntime" not in usable:
            after = measured.engines["onnxruntime"]
            raise ConvolveError(
                f"--int8: loses {measured.model - after:.2%} of accuracy ({measured.model:.2%} to {after:.2%}), more "
                f"than --max-accuracy-loss {max_loss:g}; nothing was written; export without --int8"
            )
        quantization = {"float_accuracy": measured.model, "accuracies": usable, "test_samples": measured.samples}
        set_metadata(int8_draft, replace(metadata, quantization=quantization))
        int8_draft.replace(draft)
    finally:
        int8_draft.unlink(missing_ok=True)
    return replace(measured, engines=usable)


def _measure_int8(path: Path, trained: TrainedModel, data: DataModule) -> Int8Accuracy:
    """Classify all test images with the model and with the int8 file on every installed engine."""
    threads = torch.get_num_threads()
    predictors = {"model": reference_predictor(trained), "onnxruntime": open_onnxruntime(path, threads).run}
    if is_installed("openvino"):
        predictors["openvino"] = open_openvino(path, threads).run
    correct, count = dict.fromkeys(predictors, 0), 0
    for pixels, labels in iter_test_batches(data):
        for name, predictor in predictors.items():
            correct[name] += int((predictor(pixels).argmax(1) == labels).sum())
        count += len(labels)
    accuracies = {name: number / count for name, number in correct.items()}
    return Int8Accuracy(accuracies.pop("model"), accuracies, count)
