"""`convolve export`: write a trained model as a file for other programs, and verify it before it is saved.

The file is written as a draft, opened again and run at batch sizes 1, 2 and 7. Its logits must match those of
the model to 1e-4 of the largest logit; weights without a graph must match exactly. Otherwise the draft is deleted.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from convolve import device
from convolve.checkpoint.store import choose_checkpoint
from convolve.data.build import DataModule
from convolve.engine.user_code import NO_USER_CODE, UserCode
from convolve.errors import ConfigError, ConvolveError, suggest
from convolve.export.formats import (
    FORMATS,
    ExportModule,
    Logits,
    Pixels,
    Predictor,
    open_export,
    read_weights,
    write_export,
)
from convolve.export.quantize import CALIBRATION_IMAGES, quantize
from convolve.files import atomic_file
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
BATCH_SIZES = (1, 2, 7)
TOLERANCE = 1e-4
MAX_INT8_LOSS = 0.01


@dataclass(frozen=True)
class VerifyResult:
    """Comparison of an export with its model. The difference is that of logits, as a fraction of the largest logit."""

    batches: tuple[int, ...]
    largest_difference: float
    same_predictions: bool


@dataclass(frozen=True)
class ExportReport:
    """Result of an export. The accuracies are in [0, 1]; they are measured on `test_samples` images, for int8 only."""

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

    def __fspath__(self) -> str:
        return str(self.path)


def export(
    path: Path,
    name: str,
    console: Console,
    *,
    output: Path | None = None,
    int8: bool = False,
    user: UserCode = NO_USER_CODE,
) -> ExportReport:
    """Export a checkpoint, or the best checkpoint of a run, in the named format."""
    start = time.perf_counter()
    name = _check_format(name, int8, output)
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
            accuracies = _quantize(draft, trained, metadata, console) if int8 else (None, None, 0)
    except OSError as error:
        raise ConvolveError(f"{target}: cannot write ({error.strerror}); choose another --output") from error
    seconds = time.perf_counter() - start
    size = target.stat().st_size
    return ExportReport(target, name, size, seconds, verified.batches, verified.largest_difference, int8, *accuracies)


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


def sample_pixels(height: int, width: int, channels: int, count: int = sum(BATCH_SIZES)) -> Pixels:
    """Return images that need no data set: noise, alternating with smoothed noise that reaches other activations."""
    noise = np.random.default_rng(0).integers(0, 256, (count, height, width, channels), dtype=np.uint8)
    smooth = (np.cumsum(noise, axis=1, dtype=np.int64) // 64 % 256).astype(np.uint8)
    return np.where((np.arange(count) % 2 == 0)[:, None, None, None], noise, smooth)


def compare(predictor: Predictor, reference: Predictor, pixels: Pixels) -> VerifyResult:
    """Run both functions on different images at batch sizes 1, 2 and 7."""
    differences, same, start = [0.0], True, 0
    for size in BATCH_SIZES:
        batch = np.ascontiguousarray(pixels[start : start + size])
        expected, logits = reference(batch), predictor(batch)
        if logits.ndim != 2 or len(logits) != size:
            raise ConvolveError(f"export: output has shape {logits.shape} for {size} images; try another --format")
        differences.append(float(np.abs(expected - logits).max() / max(float(np.abs(expected).max()), 1e-30)))
        same = same and bool((expected.argmax(1) == logits.argmax(1)).all())
        start += size
    return VerifyResult(BATCH_SIZES, max(differences), same)


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
    draft: Path, trained: TrainedModel, metadata: ModelMetadata, console: Console
) -> tuple[float, float, int]:
    """Replace the draft by its int8 version. Return the accuracy before and after, and the number of test images."""
    data = open_run_data(trained, console)
    int8_draft = draft.with_name(f"{draft.name}.int8")
    try:
        quantize(draft, int8_draft, metadata, training_pixels(data, trained.config.run.seed, CALIBRATION_IMAGES))
        predictor, _ = open_export("onnx", int8_draft)
        before, after, count = _accuracies(reference_predictor(trained), predictor, data)
        if before - after > MAX_INT8_LOSS:
            raise ConvolveError(
                f"--int8: loses {before - after:.2%} of accuracy ({before:.2%} to {after:.2%}), more than "
                f"{MAX_INT8_LOSS:.0%}; nothing was written; export without --int8"
            )
        int8_draft.replace(draft)
    finally:
        int8_draft.unlink(missing_ok=True)
    return before, after, count


def _accuracies(first: Predictor, second: Predictor, data: DataModule) -> tuple[float, float, int]:
    """Return the accuracy of two predictors on all test images, and the number of images."""
    correct, count = np.zeros(2), 0
    for pixels, labels in iter_test_batches(data):
        correct += [(predictor(pixels).argmax(1) == labels).sum() for predictor in (first, second)]
        count += len(labels)
    return float(correct[0] / count), float(correct[1] / count), count
