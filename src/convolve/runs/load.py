"""Trained models from checkpoints, and the data of their run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from convolve import device
from convolve.checkpoint.provenance import read_provenance
from convolve.checkpoint.store import load
from convolve.config import Config
from convolve.config.loading import build_stored
from convolve.data.build import DataModule, load_dataset, without_augmentation
from convolve.data.dataset import Dataset, Images, Reader, Task
from convolve.data.lookup import open_scored
from convolve.data.transforms.normalize import Transform
from convolve.engine.build import build_model
from convolve.engine.state import load_weights
from convolve.engine.user_code import NO_USER_CODE, UserCode
from convolve.errors import CheckpointError
from convolve.loggers.base import Console
from convolve.models.network import Network


@dataclass(frozen=True)
class TrainedModel:
    """A model with the weights of a checkpoint, and what is needed to use it.

    `weights` are name, source and license of the weights that training started from, if these are known. `thresholds`
    are the probabilities from which on each label is predicted, if images have several; None if the checkpoint was not
    validated. `loss` is the name of the user's loss, if the run has one.
    """

    path: Path
    config: Config
    model: Network
    transform: Transform
    classes: tuple[str, ...]
    step: int
    epoch: float
    user: UserCode = NO_USER_CODE
    weights: dict[str, str | None] | None = None
    task: Task = "single-label"
    thresholds: tuple[float, ...] | None = None
    loss: str | None = None


def load_trained(path: Path, *, device_name: str | None = None, user: UserCode = NO_USER_CODE) -> TrainedModel:
    """Load the model of one checkpoint, in evaluation mode; `device_name` overrides the device of its config.

    A model that the user's code defined must be given again: code that a file names is never imported (`plugins`).
    """
    snapshot = load(path)
    state = snapshot.state
    try:
        config = build_stored(state["config"], name=str(state["config_name"]))
        classes, transform = tuple(map(str, state["classes"])), Transform.from_json(state["transform"])
        step, samples = snapshot.step, snapshot.count("samples")
        epoch = samples / snapshot.count("samples_per_epoch")
        task, thresholds = read_task(state), read_thresholds(state, len(classes))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, RecursionError) as error:
        raise CheckpointError(f"{path}: state.json lacks or breaks {error}; use another checkpoint") from None
    model = build_model(config, transform, len(classes), device.select(device_name or config.run.device), user)
    load_weights(model, snapshot.trained())
    weights = read_provenance(state.get("weights"))
    loss = state.get("loss") if isinstance(state.get("loss"), str) else None
    model.eval()
    return TrainedModel(path, config, model, transform, classes, step, epoch, user, weights, task, thresholds, loss)


def read_task(state: Mapping[str, Any]) -> Task:
    """Return the task in the state of a checkpoint; those of version 0.1 have one class per image."""
    task: Task = state.get("task", "single-label")
    if task not in get_args(Task):
        raise ValueError(f"task {task!r:.40}")
    return task


def read_thresholds(state: Mapping[str, Any], count: int) -> tuple[float, ...] | None:
    """Return the thresholds in the state of a checkpoint, one for each of `count` labels; None if it has none."""
    stored = state.get("thresholds")
    if stored is None:
        return None
    thresholds = tuple(map(float, stored))
    if len(thresholds) != count or not all(0 <= threshold <= 1 for threshold in thresholds):
        raise ValueError(f"thresholds {stored!r:.40}")
    return thresholds


_BATCH = 256


def open_run_data(trained: TrainedModel, console: Console, *, train: bool = True) -> DataModule:
    """Open the data that a model was trained on, with its transform, on the device of the model.

    Broken images are treated as in the run. Without `train`, the training images of a folder are not read.
    """
    dataset = load_dataset(trained.config, console, trained.user.data, train=train)
    if dataset.classes != trained.classes:
        raise CheckpointError(
            f"{trained.path}: trained on classes {trained.classes[:3]}..., the data has {dataset.classes[:3]}...; "
            "give the data it was trained on"
        )
    if dataset.task != trained.task:
        raise CheckpointError(
            f"{trained.path}: is {trained.task}, the data is {dataset.task}; give the data of the run"
        )
    return _with_run_options(trained, dataset)


def open_scored_data(trained: TrainedModel, folder: Path, console: Console) -> DataModule:
    """Open the images of any labeled folder to score a model; classes are matched by name."""
    dataset = open_scored(folder, trained.config.data.dataset, trained.classes, console.progress, trained.task)
    return _with_run_options(trained, dataset)


def _with_run_options(trained: TrainedModel, dataset: Dataset[Reader]) -> DataModule:
    place = next(trained.model.parameters()).device
    return DataModule(dataset, trained.transform, place, without_augmentation(trained.config.data))


def to_pixels(images: Tensor, transform: Transform) -> Images:
    """Return the uint8 pixels [N, H, W, C] from which a model input [N, C, H, W] was made."""
    values = images.detach().to("cpu", torch.float64).permute(0, 2, 3, 1).numpy()
    pixels = (values * np.array(transform.std) + np.array(transform.mean)) * 255
    return np.ascontiguousarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))


def training_pixels(data: DataModule, seed: int, count: int) -> Images:
    """Return the first `count` training images in shuffled order, or all if there are fewer."""
    loader = data.train_loader()
    count = min(count, len(loader))
    batches: list[Images] = []
    for step_batch in loader.step_batches(seed, 0, _BATCH, _BATCH):
        batches += [to_pixels(batch.images, data.transform) for batch in step_batch.micro_batches]
        if sum(map(len, batches)) >= count:
            break
    return np.concatenate(batches)[:count]


def iter_test_batches(data: DataModule) -> Iterator[tuple[Images, npt.NDArray[Any]]]:
    """Yield every test image once with its label, in batches: class numbers [N], or floats [N, classes]."""
    for batch in data.test_loader().batches(data.transform.pass_size):
        yield to_pixels(batch.images, data.transform), batch.labels.cpu().numpy()
