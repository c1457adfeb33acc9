"""`convolve predict`: classify pictures with a trained network."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from convolve.app.assembly import Trained, choose_checkpoint, load_trained
from convolve.app.console import Console
from convolve.data.pictures import fit_digit, read_picture
from convolve.engine.evaluation import evaluating
from convolve.errors import DataError

BATCH = 256


@dataclass(frozen=True)
class Prediction:
    """What the network sees in one picture; the classes stand in order of probability."""

    file: str
    label: str
    probability: float
    probabilities: dict[str, float]


@dataclass(frozen=True)
class PredictReport:
    """Predictions in the order given, and the pictures that could not be read."""

    predictions: list[Prediction]
    failures: dict[str, str]


def list_pictures(paths: Iterable[Path]) -> list[Path]:
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


def run(run: Path, paths: list[Path], console: Console, *, invert: bool | None = None) -> PredictReport:
    """Classify pictures in batches; one that cannot be read is reported, and the rest go on."""
    trained = load_trained(choose_checkpoint(run))
    pictures = list_pictures(paths)
    failures: dict[str, str] = {}
    predictions: list[Prediction] = []
    for start in range(0, len(pictures), BATCH):
        console.progress("predict", start, len(pictures))
        inputs = _read(pictures[start : start + BATCH], trained, invert, failures)
        predictions += _classify(trained, inputs)
    return PredictReport(predictions, failures)


def _read(
    paths: list[Path], trained: Trained, invert: bool | None, failures: dict[str, str]
) -> dict[Path, npt.NDArray[np.uint8]]:
    transform = trained.transform
    inputs = {}
    for path in paths:
        try:
            picture = read_picture(path, channels=transform.channels)
            inputs[path] = fit_digit(picture, transform.height, invert)
        except DataError as error:
            failures[str(path)] = str(error)
    return inputs


def _classify(trained: Trained, inputs: dict[Path, npt.NDArray[np.uint8]]) -> Iterator[Prediction]:
    if not inputs:
        return
    where = next(trained.network.parameters()).device
    pixels = torch.from_numpy(np.stack(list(inputs.values()))).to(where)
    with evaluating(trained.network):
        shares = trained.network(trained.transform(pixels)).softmax(dim=1).cpu()
    for path, row in zip(inputs, shares, strict=True):
        ranked = row.argsort(descending=True).tolist()
        probabilities = {trained.classes[index]: float(row[index]) for index in ranked}
        label = trained.classes[ranked[0]]
        yield Prediction(str(path), label, probabilities[label], probabilities)
