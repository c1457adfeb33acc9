"""The one classifier behind `convolve predict` and `convolve serve`.

A `Classifier` is the model of one checkpoint or exported file, run by an engine. It maps uint8 pixels [N, H, W, C] to
probabilities [N, classes]: p = exp(z - max z) / sum exp(z - max z) of the logits z, or p = 1 / (1 + exp(-z)) if images
have several labels. It explains predictions of a checkpoint with Grad-CAM, those of an exported file by occlusion.
Torch is imported only where a checkpoint needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from convolve import device
from convolve.data.image_io import Images, read_image
from convolve.errors import CheckpointError, ConfigError, ConvolveError, DataError
from convolve.files import write_file
from convolve.inference.engines.base import Engine, describe
from convolve.inference.engines.factory import BATCH_SIZES, LONG_BATCH_SECONDS, EngineSource, open_engine
from convolve.inference.exported import is_exported, open_exported
from convolve.inference.metadata import ModelMetadata
from convolve.inference.occlusion import occlusion
from convolve.inference.overlay import Heatmaps, overlay_png
from convolve.inference.preprocess import preprocess
from convolve.label_scores import sigmoid
from convolve.loggers.base import Console

if TYPE_CHECKING:
    from convolve.engine.user_code import UserCode
    from convolve.models.network import Network

Probabilities = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Classifier:
    """A trained model, ready for inference. `version` is the name of its checkpoint or file.

    `model` has the layers, which Grad-CAM needs; None for an exported file.
    """

    version: str
    metadata: ModelMetadata
    engine: Engine
    model: Network | None = None

    def classify(self, pixels: Images) -> Probabilities:
        """Return probabilities [N, classes] of pixels [N, H, W, C]."""
        return self.to_probabilities(self.engine.run(pixels))

    def to_probabilities(self, logits: npt.NDArray[np.float32]) -> Probabilities:
        """Return the probabilities of logits [N, classes]."""
        return softmax(logits) if self.metadata.thresholds is None else sigmoid(logits)

    @property
    def saliency(self) -> str:
        """Method of the heatmaps: Grad-CAM if the layers are known, occlusion otherwise."""
        return "occlusion" if self.model is None else "Grad-CAM"

    def explain(self, pixels: Images, classes: npt.NDArray[np.int64]) -> Heatmaps:
        """Return heatmaps [N, H, W] of one class for each image."""
        if self.model is None:
            return occlusion(self.engine.run, pixels, classes)
        import torch

        from convolve.inference.gradcam import grad_cam

        target = next(self.model.parameters()).device
        images = self.metadata.transform(torch.from_numpy(pixels).to(target))
        return grad_cam(self.model, images, torch.from_numpy(classes).to(target))

    def check(self) -> None:
        """Classify a fixed batch and require finite probabilities. The first request then finds everything warm."""
        channels, height, width = self.metadata.transform.shape
        probe = np.random.default_rng(0).integers(0, 256, (2, height, width, channels), np.uint8)
        for pixels in (probe[:1], probe):
            if not np.isfinite(self.classify(pixels)).all():
                raise CheckpointError(f"{self.version}: the model's output is not finite; use an earlier checkpoint")


def softmax(logits: npt.NDArray[np.float32]) -> Probabilities:
    """Return the softmax of each row."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)


def require_pixels(metadata: ModelMetadata, source: Path) -> None:
    """Reject a model that was trained on float images of the user's code: how pixels become such is not known."""
    if metadata.transform.takes_floats:
        raise ConfigError(
            f"{source}: was trained on float images of your data set; classify in Python, with convolve.load(run, "
            "transform=...), a function from an image to a tensor [C, H, W]"
        )


@dataclass(frozen=True)
class LoadOptions:
    """How to load a classifier. `device_name` None is the device of the run.

    Args:
        engine: None is the reproducible one: torch, onnxruntime for an ONNX file, or OpenVINO for its IR.
        batch_sizes: those for which `auto` chooses an engine.
        expected_images: number of images to classify, if known.
        log: receives a line about the engine.
    """

    engine: str | None = None
    threads: int | None = None
    batch_sizes: Sequence[int] = BATCH_SIZES
    expected_images: int | None = None
    device_name: str | None = None
    user: UserCode | None = None
    log: Callable[[str], object] = lambda line: None


def load_classifier(path: Path, options: LoadOptions) -> Classifier:
    """Load an exported file, or a checkpoint folder on the device of its config, and set the CPU threads."""
    if is_exported(path):
        source = open_exported(path, options.threads or device.available_threads())
        return Classifier(path.name, source.metadata, _open(source, options))
    return _load_checkpoint(path, options)


def _load_checkpoint(path: Path, options: LoadOptions) -> Classifier:
    import torch

    from convolve.engine.user_code import NO_USER_CODE
    from convolve.inference.engines.trained import TrainedSource
    from convolve.inference.metadata import metadata_of
    from convolve.runs.load import load_trained

    trained = load_trained(path, device_name=options.device_name, user=options.user or NO_USER_CODE)
    device.configure(options.threads or trained.config.run.threads)
    source = TrainedSource(trained.model, metadata_of(trained), torch.get_num_threads())
    return Classifier(path.name, source.metadata, _open(source, options), source.folded)


def _open(source: EngineSource, options: LoadOptions) -> Engine:
    name = options.engine or source.names[0]
    sizes = [min(size, source.metadata.transform.pass_size) for size in options.batch_sizes]
    return open_engine(name, source, options.log, sizes, options.expected_images, LONG_BATCH_SECONDS)


@dataclass(frozen=True)
class Prediction:
    """Prediction for one image file, with all classes in order of probability.

    `labels` are the predicted labels, likeliest first: one class, or any number if images have several labels.
    """

    file: str
    label: str
    probability: float
    probabilities: dict[str, float]
    explanation: str | None = None
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class PredictReport:
    """Predictions in input order, the error of each image that could not be read, and the engine that was used.

    `multi_label` if images may have several labels.
    """

    predictions: list[Prediction]
    failures: dict[str, str]
    engine: str
    multi_label: bool = False


def rank_classes(
    probabilities: npt.NDArray[np.float32], classes: tuple[str, ...], top: int | None = None
) -> dict[str, float]:
    """Return the probabilities of one image by class name, highest first; `top` limits their number."""
    order = [probabilities.argmax()] if top == 1 else np.argsort(-probabilities, kind="stable")[:top]
    return {classes[index]: float(probabilities[index]) for index in order}


def choose_labels(ranked: Mapping[str, float], metadata: ModelMetadata) -> tuple[str, ...]:
    """Return the predicted labels of ranked probabilities: the first, or those that reach their threshold."""
    if metadata.thresholds is None:
        return (next(iter(ranked)),)
    lowest = dict(zip(metadata.classes, metadata.thresholds, strict=True))
    return tuple(label for label, probability in ranked.items() if probability >= lowest[label])


def list_images(paths: Iterable[Path]) -> list[Path]:
    """Return the given files and all files inside the given folders, in a fixed order."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(item for item in path.rglob("*") if item.is_file() and not item.name.startswith("."))
        else:
            files.append(path)
    if not files:
        raise DataError(f"{', '.join(map(str, paths)) or 'no path'}: no image found; give image files or a folder")
    return files


def predict(
    run: Path,
    paths: list[Path],
    console: Console,
    *,
    invert: bool | None = None,
    explain_dir: Path | None = None,
    engine: str = "auto",
) -> PredictReport:
    """Classify images in batches. An unreadable image is reported and the others are still classified.

    Args:
        run: run or checkpoint folder, or an exported ONNX file or OpenVINO IR.
        invert: for digits, True if the ink is darker than the paper; None: detected in each image.
        explain_dir: folder for images with heat maps.
    """
    files = list_images(paths)
    options = LoadOptions(engine, batch_sizes=(len(files),), expected_images=len(files), log=console.info)
    classifier = load_classifier(choose_model(run), options)
    require_pixels(classifier.metadata, run)
    failures: dict[str, str] = {}
    predictions: list[Prediction] = []
    batch_size = classifier.metadata.transform.pass_size
    for start in range(0, len(files), batch_size):
        console.progress("predict", start, len(files))
        inputs = _read(files[start : start + batch_size], classifier.metadata, invert, failures)
        if inputs:
            predictions += _predict_batch(classifier, inputs, explain_dir)
    several = classifier.metadata.thresholds is not None
    return PredictReport(predictions, failures, describe(classifier.engine), several)


def choose_model(path: Path) -> Path:
    """Return an exported file itself, or the best checkpoint of a run."""
    if is_exported(path):
        return path
    from convolve.checkpoint.store import choose_checkpoint

    return choose_checkpoint(path)


def _read(
    files: list[Path], metadata: ModelMetadata, invert: bool | None, failures: dict[str, str]
) -> dict[Path, Images]:
    inputs, spec = {}, metadata.input_spec
    for path in files:
        try:
            inputs[path] = preprocess(read_image(path, channels=spec.channels), spec, invert)
        except DataError as error:
            failures[str(path)] = str(error)
    return inputs


def _predict_batch(classifier: Classifier, inputs: dict[Path, Images], explain_dir: Path | None) -> list[Prediction]:
    pixels = np.stack(list(inputs.values()))
    probabilities = classifier.classify(pixels)
    explanations: list[str | None] = [None] * len(inputs)
    if explain_dir is not None:
        heatmaps = classifier.explain(pixels, probabilities.argmax(axis=1))
        explanations = [*_write_overlays(inputs, heatmaps, explain_dir)]
    predictions = []
    for path, row, explanation in zip(inputs, probabilities, explanations, strict=True):
        ranked = rank_classes(row, classifier.metadata.classes)
        label = next(iter(ranked))
        labels = choose_labels(ranked, classifier.metadata)
        predictions.append(Prediction(str(path), label, ranked[label], ranked, explanation, labels))
    return predictions


def _write_overlays(inputs: dict[Path, Images], heatmaps: Heatmaps, folder: Path) -> list[str]:
    """Write one heat map for each input and return the paths. Equal names get a number."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConvolveError(f"--explain {folder}: cannot create ({error.strerror}); choose another folder") from error
    written = []
    for (path, pixels), heatmap in zip(inputs.items(), heatmaps, strict=True):
        target = _unused_name(folder, path.stem)
        write_file(target, overlay_png(pixels, heatmap))
        written.append(str(target))
    return written


def _unused_name(folder: Path, stem: str) -> Path:
    names = (folder / f"{stem}-explained{end}.png" for end in chain([""], map("-{}".format, count(2))))
    return next(path for path in names if not path.exists())
