"""Distillation (`--teacher`): a run learns from the probabilities of a trained model besides the labels.

The arithmetic (Hinton, Vinyals and Dean 2015): with logits z of this model and t of the teacher, temperature T and
weight w, the loss of a sample is

    (1 - w) loss(z, label) + w T^2 KL(softmax(t / T) || softmax(z / T))

The teacher is in evaluation mode and gets the images of each micro batch as this model does: augmented, and mixed if
they are. So its probabilities depend on nothing but the micro batch, in any layout and after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from convolve.checkpoint.manifest import part_sha256
from convolve.checkpoint.store import choose_checkpoint
from convolve.config import Config
from convolve.data.build import DataModule
from convolve.data.transforms.normalize import Transform
from convolve.engine.forward_backward import with_teacher
from convolve.engine.step import StepParts
from convolve.errors import CheckpointError, ConfigError
from convolve.models.network import Network
from convolve.runs.load import TrainedModel, load_trained


@dataclass(frozen=True)
class Teacher:
    """A trained model whose probabilities are targets."""

    model: Network
    transform: Transform
    student: Transform
    weight: float
    temperature: float

    def __call__(self, loss: Tensor, logits: Tensor, images: Tensor) -> Tensor:
        """Return the sum over a micro batch of both losses; `loss` is that of the labels."""
        with torch.no_grad():
            advice = self.model(self._normalize(images)).float() / self.temperature
        ours = (logits.float() / self.temperature).log_softmax(dim=1)
        distance = functional.kl_div(ours, advice.log_softmax(dim=1), reduction="sum", log_target=True)
        return (1 - self.weight) * loss + self.weight * self.temperature**2 * distance.to(loss.dtype)

    def _normalize(self, images: Tensor) -> Tensor:
        """Return images as the teacher gets them, from those of this model."""
        mine, other = self.student, self.transform
        if (mine.mean, mine.std) == (other.mean, other.std):
            return images
        columns = [images.new_tensor(values)[:, None, None] for values in (mine.std, mine.mean, other.mean, other.std)]
        return (images * columns[0] + columns[1] - columns[2]) / columns[3]


def add_teacher(config: Config, data: DataModule, parts: StepParts) -> StepParts:
    """Return the parts of a step that learn from the teacher of a config, unchanged if it has none."""
    folder = config.optim.teacher
    if folder is None:
        return parts
    trained = load_trained(choose_checkpoint(folder), device_name=str(data.device))
    _check(trained, folder, data)
    teacher = Teacher(
        trained.model.requires_grad_(False),
        trained.transform,
        data.transform,
        config.optim.teacher_weight,
        config.optim.teacher_temperature,
    )
    return replace(parts, forward_backward=with_teacher(parts.forward_backward, teacher))


def _check(trained: TrainedModel, folder: Path, data: DataModule) -> None:
    subject, dataset = f"--teacher {folder}", data.dataset
    if "multi-label" in (trained.task, dataset.task):
        raise ConfigError(f"{subject}: distillation is for images of one class, not of several labels; omit it")
    if trained.classes != dataset.classes:
        raise ConfigError(
            f"{subject}: has {len(trained.classes)} classes ({', '.join(trained.classes[:3])}, ...), the data has "
            f"{len(dataset.classes)} ({', '.join(dataset.classes[:3])}, ...); give a run on the same classes"
        )
    if trained.transform.shape != data.transform.shape:
        channels, height, width = trained.transform.shape
        raise ConfigError(
            f"{subject}: has images of {width}x{height} with {channels} channels, this run of {data.transform.width}x"
            f"{data.transform.height} with {data.transform.channels}; set --image-size {height}"
        )


def describe_teacher(config: Config) -> dict[str, Any]:
    """Return what checkpoints store of a teacher: the sha256 of its weights; empty without one."""
    folder = config.optim.teacher
    return {} if folder is None else {"teacher": part_sha256(choose_checkpoint(folder), "model")}


def require_same_teacher(config: Config, stored: object) -> None:
    """Reject the resumption of a run whose teacher has changed."""
    if stored != describe_teacher(config).get("teacher"):
        raise CheckpointError(
            f"--teacher {config.optim.teacher}: its best checkpoint is not the one that this run started with; "
            "restore that one, or start a new run"
        )
