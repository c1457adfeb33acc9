"""`convolve export`: a trained network as a file for other programs, proven before it gets its name.

Proof that an exported file computes what the network computes, at several batch sizes.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from convolve import device
from convolve.data.build import DataModule
from convolve.errors import ConfigError, ConvolveError, suggest
from convolve.export.formats import (
    FORMATS,
    Classifier,
    Logits,
    Pixels,
    Predictor,
    open_export,
    read_weights,
    write_export,
)
from convolve.export.quantize import CALIBRATION_IMAGES, quantize
from convolve.inference.metadata import ModelMetadata, metadata_of
from convolve.layers.fold import fold_batch_norms
from convolve.loggers.base import Console
from convolve.run_files import CHECKPOINTS_FOLDER, export_name
from convolve.runs.load import (
    TrainedModel,
    choose_checkpoint,
    iter_test_batches,
    load_trained,
    open_run_data,
    training_pixels,
)

BATCHES = (1, 2, 7)
TOLERANCE = 1e-4


@dataclass(frozen=True)
class VerifyResult:
    """What the comparison found; the difference is that of logits, as a share of the largest."""

    batches: tuple[int, ...]
    largest_difference: float
    same_answers: bool


def sample_pixels(height: int, width: int, channels: int, count: int = sum(BATCHES)) -> Pixels:
    """Test images that need no data set: noise, and noise made smooth, which reaches other activations."""
    noise = np.random.default_rng(0).integers(0, 256, (count, height, width, channels), dtype=np.uint8)
    smooth = (np.cumsum(noise, axis=1, dtype=np.int64) // 64 % 256).astype(np.uint8)
    return np.where((np.arange(count) % 2 == 0)[:, None, None, None], noise, smooth)


def compare(runner: Predictor, reference: Predictor, pixels: Pixels) -> VerifyResult:
    """Run both on batches of 1, 2 and 7 different images."""
    differences, same, start = [0.0], True, 0
    for size in BATCHES:
        batch = np.ascontiguousarray(pixels[start : start + size])
        ours, theirs = reference(batch), _checked(runner(batch), size)
        differences.append(float(np.abs(ours - theirs).max() / max(float(np.abs(ours).max()), 1e-30)))
        same = same and bool((ours.argmax(1) == theirs.argmax(1)).all())
        start += size
    return VerifyResult(BATCHES, max(differences), same)


def require_equal(proof: VerifyResult, what: str) -> None:
    """Refuse an export whose logits are not those of the network."""
    if not proof.largest_difference <= TOLERANCE:
        raise ConvolveError(
            f"{what}: its logits differ from the network's by {proof.largest_difference:.2g} of the largest, more than "
            f"{TOLERANCE:g}; nothing was written; try another --format"
        )


def _checked(logits: Logits, size: int) -> Logits:
    if logits.ndim != 2 or len(logits) != size:
        raise ConvolveError(f"the export gives an output of shape {logits.shape} for {size} images; try another format")
    return logits


ALIASES = {"frozen": "onnx"}
MAX_INT8_LOSS = 0.01


@dataclass(frozen=True)
class ExportReport:
    """One finished export. The accuracies are shares of 1 and measured for int8 only, on `test_samples` images."""

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


def classifier_of(trained: TrainedModel, name: str) -> Classifier:
    """What a format holds: a graph with folded batch norms, or the weights as they were trained."""
    network = fold_batch_norms(trained.network) if FORMATS[name].has_graph else trained.network
    return Classifier(network, trained.transform)


def export(path: Path, name: str, console: Console, *, output: Path | None = None, int8: bool = False) -> ExportReport:
    """Export the checkpoint that a path means. The file gets its name only after its answers were compared."""
    began = time.perf_counter()
    name = _check_format(name, int8, output)
    checkpoint = choose_checkpoint(path)
    trained = load_trained(checkpoint, where="cpu")
    device.configure(trained.config.run.threads)
    target = output or _default_target(checkpoint, name, int8)
    draft = target.with_name(f"draft-{os.getpid()}-{target.name}")
    console.say(f"exporting {trained.config.model.model} of {checkpoint} as {name}{' in int8' if int8 else ''}")
    classifier, card = classifier_of(trained, name), metadata_of(trained)
    _make_folder(target)
    try:
        write_export(name, classifier, card, draft)
        proof = _verify(name, draft, trained, target)
        accuracies = _quantize(draft, trained, card, console) if int8 else (None, None, 0)
        draft.replace(target)
    except OSError as error:
        raise ConvolveError(f"{target}: cannot be written ({error.strerror}); choose another --output") from error
    finally:
        draft.unlink(missing_ok=True)
    seconds = time.perf_counter() - began
    size = target.stat().st_size
    return ExportReport(target, name, size, seconds, proof.batches, proof.largest_difference, int8, *accuracies)


def _make_folder(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConvolveError(f"{target}: cannot be written ({error.strerror}); choose another --output") from error


def _check_format(name: str, int8: bool, output: Path | None) -> str:
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        raise ConfigError(f"--format {name}: no such format; {suggest(name, [*FORMATS, *ALIASES])}")
    if int8 and name != "onnx":
        raise ConfigError(f"--int8 with --format {name}: eight-bit files are ONNX; use --format onnx")
    if name == "aoti" and output is not None and output.suffix != ".pt2":
        raise ConfigError(
            f"--output {output}: a package of machine code must end in .pt2, or torch refuses it; rename it"
        )
    return name


def _default_target(checkpoint: Path, name: str, int8: bool) -> Path:
    """Into the run folder, or beside a checkpoint that belongs to none."""
    folder = checkpoint.resolve().parent
    run_folder = folder.parent if folder.name == CHECKPOINTS_FOLDER else folder
    return run_folder / export_name(FORMATS[name].suffix, int8=int8)


def reference_predictor(trained: TrainedModel) -> Predictor:
    """The network as it was trained, as a function from pixels to logits."""

    def run(pixels: Pixels) -> Logits:
        with torch.inference_mode():
            logits = trained.network(trained.transform(torch.from_numpy(pixels)))
        return np.asarray(logits)

    return run


def _verify(name: str, draft: Path, trained: TrainedModel, target: Path) -> VerifyResult:
    channels, height, width = trained.transform.shape
    if not FORMATS[name].has_graph:
        return _verify_weights(draft, trained)
    runner, _ = open_export(name, draft)
    proof = compare(runner, reference_predictor(trained), sample_pixels(height, width, channels))
    require_equal(proof, str(target))
    return proof


def _verify_weights(draft: Path, trained: TrainedModel) -> VerifyResult:
    """Weights have no graph to run: they must come back equal to the bit."""
    stored, _ = read_weights(draft)
    own = trained.network.state_dict()
    if set(stored) != set(own) or not all(torch.equal(stored[key], own[key].cpu()) for key in own):
        raise ConvolveError(f"{draft}: the stored weights are not those of the network; nothing was written")
    return VerifyResult((), 0.0, True)


def _quantize(draft: Path, trained: TrainedModel, card: ModelMetadata, console: Console) -> tuple[float, float, int]:
    """Turn the draft into int8 and measure what it costs; accuracies before and after, and the images counted."""
    material = open_run_data(trained, console)
    eight = draft.with_name(f"{draft.name}.int8")
    try:
        quantize(draft, eight, card, training_pixels(material, trained.config.run.seed, CALIBRATION_IMAGES))
        runner, _ = open_export("onnx", eight)
        before, after, count = _accuracies(reference_predictor(trained), runner, material)
        if before - after > MAX_INT8_LOSS:
            raise ConvolveError(
                f"int8 costs {before - after:.2%} of accuracy ({before:.2%} to {after:.2%}), more than "
                f"{MAX_INT8_LOSS:.0%}; nothing was written; export without --int8"
            )
        eight.replace(draft)
    finally:
        eight.unlink(missing_ok=True)
    return before, after, count


def _accuracies(one: Predictor, other: Predictor, material: DataModule) -> tuple[float, float, int]:
    """Accuracy of two runners on every test image, and their number."""
    right, count = np.zeros(2), 0
    for pixels, labels in iter_test_batches(material):
        right += [(runner(pixels).argmax(1) == labels).sum() for runner in (one, other)]
        count += len(labels)
    return float(right[0] / count), float(right[1] / count), count
