"""The one classifier behind `convolve predict` and `convolve serve`.

A `Classifier` is the model of one checkpoint with its batch norms folded. It maps uint8 pixels [N, H, W, C] to
probabilities [N, classes] and explains predictions with Grad-CAM.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from convolve import device
from convolve.checkpoint.store import choose_checkpoint
from convolve.data.dataset import Images
from convolve.data.image_io import read_image
from convolve.engine.user_code import NO_USER_CODE, UserCode
from convolve.errors import CheckpointError, ConvolveError, DataError
from convolve.files import write_file
from convolve.inference.gradcam import Heatmaps, grad_cam, overlay_png
from convolve.inference.metadata import ModelMetadata, metadata_of
from convolve.inference.preprocess import preprocess
from convolve.layers.fold import fold_batch_norms
from convolve.loggers.base import Console
from convolve.models.network import Network
from convolve.runs.load import load_trained

BATCH_SIZE = 256
Probabilities = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Classifier:
    """A trained model, ready for inference. `version` is the name of its checkpoint."""

    version: str
    metadata: ModelMetadata
    model: Network

    @classmethod
    def load(
        cls,
        checkpoint: Path,
        threads: int | None = None,
        *,
        device_name: str | None = None,
        user: UserCode = NO_USER_CODE,
    ) -> "Classifier":
        """Load a checkpoint folder on the device of its config, fold its batch norms and set the CPU threads."""
        trained = load_trained(checkpoint, device_name=device_name, user=user)
        device.configure(threads or trained.config.run.threads)
        return cls(checkpoint.name, metadata_of(trained), fold_batch_norms(trained.model))

    def classify(self, pixels: Images) -> Probabilities:
        """Return probabilities [N, classes] of pixels [N, H, W, C]."""
        with torch.inference_mode():
            logits = self.model(self._to_input(pixels))
            return np.asarray(logits.float().softmax(dim=1).cpu(), np.float32)

    def explain(self, pixels: Images, classes: npt.NDArray[np.int64]) -> Heatmaps:
        """Return Grad-CAM heatmaps [N, H, W] of one class for each image."""
        images = self._to_input(pixels)
        return grad_cam(self.model, images, torch.from_numpy(classes).to(images.device))

    def check(self) -> None:
        """Classify a fixed batch and require finite probabilities. The first request then finds everything warm."""
        channels, height, width = self.metadata.transform.shape
        probe = np.random.default_rng(0).integers(0, 256, (2, height, width, channels), np.uint8)
        for pixels in (probe[:1], probe):
            if not np.isfinite(self.classify(pixels)).all():
                raise CheckpointError(f"{self.version}: the model's output is not finite; use an earlier checkpoint")

    def _to_input(self, pixels: Images) -> torch.Tensor:
        return self.metadata.transform(torch.from_numpy(pixels).to(next(self.model.parameters()).device))


@dataclass(frozen=True)
class Prediction:
    """Prediction for one image file, with all classes in order of probability."""

    file: str
    label: str
    probability: float
    probabilities: dict[str, float]
    explanation: str | None = None


@dataclass(frozen=True)
class PredictReport:
    """Predictions in input order, and the error of each image that could not be read."""

    predictions: list[Prediction]
    failures: dict[str, str]


def rank_classes(probabilities: npt.NDArray[np.float32], classes: tuple[str, ...]) -> dict[str, float]:
    """Return the probabilities of one image by class name, highest first."""
    order = np.argsort(-probabilities, kind="stable")
    return {classes[index]: float(probabilities[index]) for index in order}


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
    run: Path, paths: list[Path], console: Console, *, invert: bool | None = None, explain_dir: Path | None = None
) -> PredictReport:
    """Classify images in batches. An unreadable image is reported and the others are still classified.

    Args:
        invert: for digits, True if the ink is darker than the paper; None: detected in each image.
        explain_dir: folder for Grad-CAM images.
    """
    classifier = Classifier.load(choose_checkpoint(run))
    files = list_images(paths)
    failures: dict[str, str] = {}
    predictions: list[Prediction] = []
    for start in range(0, len(files), BATCH_SIZE):
        console.progress("predict", start, len(files))
        inputs = _read(files[start : start + BATCH_SIZE], classifier.metadata, invert, failures)
        if inputs:
            predictions += _predict_batch(classifier, inputs, explain_dir)
    return PredictReport(predictions, failures)


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
        predictions.append(Prediction(str(path), label, ranked[label], ranked, explanation))
    return predictions


def _write_overlays(inputs: dict[Path, Images], heatmaps: Heatmaps, folder: Path) -> list[str]:
    """Write one Grad-CAM image for each input and return the paths. Equal names get a number."""
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
