"""Predictions of a report."""

import numpy as np
import torch
from torch import Tensor, nn

from convolve.data.build import DataModule
from convolve.data.dataset import Dataset
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.transforms.normalize import Transform
from convolve.models.network import Network
from convolve.numerics.execution import PlainExecution
from convolve.runs.calibration import fit_calibration
from convolve.runs.report import collect_predictions
from convolve.runs.samples import SampleCollector

CLASSES = ("cat", "dog")


class CountingExecution(PlainExecution):
    """Notes how many images each forward pass has."""

    def __init__(self) -> None:
        self.images: list[int] = []

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        self.images.append(len(x))
        return super().forward(model, x)


def make_data(side: int) -> DataModule:
    chance = np.random.default_rng(1)
    images = InMemoryImages(chance.integers(0, 256, (40, 8, 8, 3), np.uint8), np.arange(40) % 2)
    transform = Transform(side, side, (0.5,) * 3, (0.5,) * 3)
    dataset = Dataset("pictures", images, images, CLASSES, "", validation=images)
    return DataModule(dataset, transform, torch.device("cpu"))


def make_model(side: int) -> Network:
    blocks = {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(3, 2)}
    return Network(blocks, input_shape=(3, side, side))


def test_few_photos_are_in_memory_at_once_and_progress_is_shown() -> None:
    data, model, execution = make_data(224), make_model(224), CountingExecution()
    shown: list[tuple[str, int, int | None]] = []

    def note(task: str, done: int, total: int | None) -> None:
        shown.append((task, done, total))

    predictions = collect_predictions(model, data, "weights", SampleCollector(CLASSES), execution, note)
    fit_calibration(model, data, execution, predictions, note)
    assert len(predictions.labels) == 40
    assert execution.images == [16, 16, 8] * 2
    assert shown == [(task, done, 40) for task in ("report", "calibrate") for done in (16, 32, 40)]


def test_small_images_are_classified_in_larger_batches() -> None:
    data, model, execution = make_data(32), make_model(32), CountingExecution()
    collect_predictions(model, data, "weights", SampleCollector(CLASSES), execution)
    assert execution.images == [40]
