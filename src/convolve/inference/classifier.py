"""`convolve predict`: classify pictures with a trained network.

A network in service: pixels in, probabilities out, and the reasons on request.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from convolve import device
from convolve.data.dataset import Images
from convolve.data.image_io import read_image
from convolve.engine.evaluate import eval_mode
from convolve.errors import ConvolveError, DataError
from convolve.files import replace_file
from convolve.inference.gradcam import Heat, explain, paint
from convolve.inference.metadata import ModelMetadata, metadata_of
from convolve.inference.preprocess import fit_image
from convolve.layers.fold import fold_batch_norms
from convolve.loggers.base import Console
from convolve.models.network import Network
from convolve.runs.load import TrainedModel, choose_checkpoint, load_trained

BATCH = 256


@dataclass(frozen=True)
class Prediction:
    """What the network sees in one picture; the classes stand in order of probability."""

    file: str
    label: str
    probability: float
    probabilities: dict[str, float]
    explanation: str | None = None


@dataclass(frozen=True)
class PredictReport:
    """Predictions in the order given, and the pictures that could not be read."""

    predictions: list[Prediction]
    failures: dict[str, str]


def list_images(paths: Iterable[Path]) -> list[Path]:
    """The files named, and those inside folders named, in a fixed order."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(item for item in path.rglob("*") if item.is_file() and not item.name.startswith("."))
        else:
            found.append(path)
    if not found:
        raise DataError(
            f"{', '.join(map(str, paths)) or 'no path'}: no picture there; give picture files or a folder of them"
        )
    return found


def predict(
    run: Path, paths: list[Path], console: Console, *, invert: bool | None = None, explain_dir: Path | None = None
) -> PredictReport:
    """Classify pictures in batches; one that cannot be read is reported, and the rest go on.

    Args:
        explain_dir: folder for pictures that show where the network found its evidence (Grad-CAM).
    """
    trained = load_trained(choose_checkpoint(run))
    device.configure(trained.config.run.threads)
    trained = replace(trained, network=fold_batch_norms(trained.network))
    pictures = list_images(paths)
    failures: dict[str, str] = {}
    predictions: list[Prediction] = []
    for start in range(0, len(pictures), BATCH):
        console.progress("predict", start, len(pictures))
        inputs = _read(pictures[start : start + BATCH], trained, invert, failures)
        if inputs:
            pixels = torch.from_numpy(np.stack(list(inputs.values())))
            shares = _classify(trained, pixels)
            explained = [None] * len(inputs) if explain_dir is None else _explain(trained, inputs, shares, explain_dir)
            predictions += map(partial(_describe, trained.classes), inputs, shares, explained)
    return PredictReport(predictions, failures)


def _read(
    paths: list[Path], trained: TrainedModel, invert: bool | None, failures: dict[str, str]
) -> dict[Path, npt.NDArray[np.uint8]]:
    card = metadata_of(trained)
    inputs = {}
    for path in paths:
        try:
            inputs[path] = fit_image(read_image(path, channels=card.transform.channels), card, invert)
        except DataError as error:
            failures[str(path)] = str(error)
    return inputs


def _classify(trained: TrainedModel, pixels: torch.Tensor) -> torch.Tensor:
    where = next(trained.network.parameters()).device
    with eval_mode(trained.network):
        shares: torch.Tensor = trained.network(trained.transform(pixels.to(where))).softmax(dim=1).cpu()
    return shares


def _describe(classes: tuple[str, ...], path: Path, row: torch.Tensor, explained: str | None) -> Prediction:
    ranked = row.argsort(descending=True).tolist()
    probabilities = {classes[index]: float(row[index]) for index in ranked}
    label = classes[ranked[0]]
    return Prediction(str(path), label, probabilities[label], probabilities, explained)


def _explain(
    trained: TrainedModel, inputs: dict[Path, npt.NDArray[np.uint8]], shares: torch.Tensor, folder: Path
) -> list[str]:
    """Write one Grad-CAM picture for each input, and return their paths; equal names get a number."""
    where = next(trained.network.parameters()).device
    images = trained.transform(torch.from_numpy(np.stack(list(inputs.values()))).to(where))
    heats = explain(trained.network, images, shares.argmax(dim=1).to(where))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConvolveError(f"{folder}: cannot be made ({error.strerror}); choose another --explain") from error
    written = []
    for (path, pixels), heat in zip(inputs.items(), heats, strict=True):
        target = _free_name(folder, path.stem)
        replace_file(target, paint(pixels, heat))
        written.append(str(target))
    return written


def _free_name(folder: Path, stem: str) -> Path:
    names = (folder / f"{stem}-explained{end}.png" for end in chain([""], map("-{}".format, count(2))))
    return next(path for path in names if not path.exists())


Probabilities = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ServableModel:
    """One version of one named network. `version` is the name of its checkpoint."""

    name: str
    version: str
    card: ModelMetadata
    network: Network

    def classify(self, pixels: Images) -> Probabilities:
        """Probabilities [N, classes] of images [N, H, W, C]."""
        with torch.inference_mode():
            logits = self.network(self.card.transform(self._place(pixels)))
            return np.asarray(logits.float().softmax(dim=1).cpu(), np.float32)

    def explain(self, pixels: Images, answers: npt.NDArray[np.int64]) -> Heat:
        """Where the evidence for the answers lies: heat maps [N, H, W]."""
        images = self.card.transform(self._place(pixels))
        return explain(self.network, images, torch.from_numpy(answers).to(images.device))

    def warm_up(self) -> None:
        """Run once, so that the first client does not wait for one-time work."""
        channels, height, width = self.card.transform.shape
        for size in (1, 2):
            self.classify(np.zeros((size, height, width, channels), np.uint8))

    def _place(self, pixels: Images) -> torch.Tensor:
        return torch.from_numpy(pixels).to(next(self.network.parameters()).device)


Reload = Callable[[str | None], ServableModel | None]
"""Given the version in service, the model that should take its place, or None if that is still the right one."""
