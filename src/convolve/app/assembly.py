"""The pieces that several verbs need: the data, the network, and a trained network from a checkpoint."""

from dataclasses import dataclass
from pathlib import Path

import torch

from convolve import device
from convolve.app.console import Console
from convolve.checkpoint.store import find, find_best, load
from convolve.checkpoint.transfer import transfer
from convolve.config import Config
from convolve.config.loading import build
from convolve.config.schema import DataConfig
from convolve.data.dataset import Dataset
from convolve.data.feeding import choose_samples, fit_input, open_test_loader, open_train_loader
from convolve.data.loader import Loader
from convolve.data.lookup import open_dataset
from convolve.data.transform import Transform
from convolve.engine.state import load_weights
from convolve.errors import CheckpointError
from convolve.models import registry
from convolve.models.fastnet import WHITENED_IMAGES, Whitening
from convolve.models.network import Network
from convolve.models.trainable import limit_training

VALID_BATCH = 500


@dataclass(frozen=True)
class Material:
    """A data set, how its pixels enter the network, and the device that the work runs on."""

    dataset: Dataset
    transform: Transform
    device: torch.device
    feed: DataConfig = DataConfig(augment="none")

    def train_loader(self) -> Loader:
        """Batches of the training split, augmented and mixed as the data section asks."""
        return open_train_loader(self.dataset.train, self.transform, self.device, self.feed)

    def test_loader(self) -> Loader:
        """Batches of the test split."""
        return open_test_loader(self.dataset.test, self.transform, self.device, self.feed)


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
    """The data set of a config, with the images that are not to be used left out of training."""
    return choose_samples(open_dataset(config.data, announce=console.say, progress=console.progress), config.data)


def gather_material(config: Config, console: Console) -> Material:
    """Device, data and transform for a training."""
    where = device.choose(config.run.device, config.run.threads)
    dataset = load_dataset(config, console)
    shape = registry.settle(config.model.model, config.model).input_shape
    transform = fit_input(dataset.train, config.data, shape[1] if shape[0] == 3 else None)
    return Material(dataset, transform, where, config.data)


def name_dataset(config: Config, name: str) -> Config:
    """The config with the data set that was really used, so that a repeat uses the same."""
    if config.data.generated_data or config.data.synthetic_data:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"dataset": name})})


def build_network(config: Config, transform: Transform, classes: int, where: torch.device) -> Network:
    """A fresh network on its device, in the memory layout that convolutions like best."""
    network = registry.build(
        config.model.model, classes=classes, input_shape=transform.shape, seed=config.run.seed, options=config.model
    )
    limit_training(network, config.model)
    return network.to(device=where, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def give_first_weights(network: Network, config: Config, loader: Loader, console: Console) -> None:
    """What a new run begins with besides its seed: weights from elsewhere, and layers that look at the data."""
    for module in network.modules():
        if isinstance(module, Whitening):
            window = next(loader.windows(config.run.seed, 0, (WHITENED_IMAGES, WHITENED_IMAGES)))
            module.fit_images(window.batches[0].images)
    if config.model.init_path is not None:
        taken = transfer(network, config.model.init_path)
        fresh = f"; {', '.join(taken.fresh)} begin fresh" if taken.fresh else ""
        console.say(f"{taken.taken} tensors from {taken.source}{fresh}")


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
