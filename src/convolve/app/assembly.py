"""The pieces that several verbs need: the data, the network, and a trained network from a checkpoint."""

from dataclasses import dataclass
from pathlib import Path

import torch

from convolve import device
from convolve.app.console import Console
from convolve.checkpoint.store import find, find_best, load
from convolve.config import Config
from convolve.config.loading import build
from convolve.data.dataset import Dataset, Split
from convolve.data.loader import MemoryLoader
from convolve.data.lookup import open_dataset
from convolve.data.transform import Transform, fit_transform
from convolve.engine.state import load_weights
from convolve.errors import CheckpointError, ConfigError
from convolve.models import registry
from convolve.models.network import Network

VALID_BATCH = 500


@dataclass(frozen=True)
class Material:
    """A data set, how its pixels enter the network, and the device that the work runs on."""

    dataset: Dataset
    transform: Transform
    device: torch.device

    def train_loader(self) -> MemoryLoader:
        """Batches of the training split."""
        return MemoryLoader(self.dataset.train, self.transform, self.device)

    def test_loader(self) -> MemoryLoader:
        """Batches of the test split."""
        return MemoryLoader(self.dataset.test, self.transform, self.device)


@dataclass(frozen=True)
class Trained:
    """A network with the weights of a checkpoint, and what it needs to be used."""

    path: Path
    config: Config
    network: Network
    transform: Transform
    classes: tuple[str, ...]
    step: int
    epoch: float


def load_dataset(config: Config, console: Console) -> Dataset:
    """The data set of a config, with the held-out images left out of training."""
    dataset = open_dataset(config.data, announce=console.say, progress=console.progress)
    held = config.data.hold_out
    if held >= len(dataset.train):
        raise ConfigError(
            f"hold-out={held}: {dataset.name} has {len(dataset.train)} training images; leave some to train on"
        )
    train = Split(dataset.train.images[held:], dataset.train.labels[held:])
    return Dataset(dataset.name, train, dataset.test, dataset.classes, dataset.origin)


def gather_material(config: Config, console: Console) -> Material:
    """Device, data and transform for a training."""
    where = device.choose(config.run.device, config.run.threads)
    dataset = load_dataset(config, console)
    return Material(dataset, fit_transform(dataset.train, config.data.normalisation), where)


def build_network(config: Config, transform: Transform, classes: int, where: torch.device) -> Network:
    """A fresh network on its device, in the memory layout that convolutions like best."""
    network = registry.build(
        config.model.model, classes=classes, input_shape=transform.shape, seed=config.run.seed, options=config.model
    )
    return network.to(device=where, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def load_trained(path: Path, *, where: str | None = None) -> Trained:
    """The network of one checkpoint, ready for evaluation."""
    snapshot = load(path)
    state = snapshot.state
    try:
        config = build(state["config"], name=str(state["config_name"]))
        classes, transform = tuple(map(str, state["classes"])), Transform.from_json(state["transform"])
        step, samples = int(state["step"]), int(state["samples"])
        epoch = samples / int(state["samples_per_epoch"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path}: state.json lacks or breaks {error}; use another checkpoint") from None
    network = build_network(
        config, transform, len(classes), device.choose(where or config.run.device, config.run.threads)
    )
    load_weights(network, snapshot)
    return Trained(path, config, network.eval(), transform, classes, step, epoch)


def choose_checkpoint(path: Path) -> Path:
    """The checkpoint to use: the one named, else the run's best by validation, else its newest."""
    paths = find(path)
    if len(paths) == 1:
        return paths[0]
    return find_best(paths[-1].parent) or paths[-1]
