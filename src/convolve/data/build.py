"""From the data section of a config to what feeds a network: which samples, which transform, which loader.

The pieces that several verbs need: the data, the network, and a trained network from a checkpoint.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from convolve import device as machine
from convolve.config import Config
from convolve.config.schema import DataConfig
from convolve.data.dataset import Dataset, Samples, Split
from convolve.data.loader.decoding import (
    USUAL_PHOTO_SIZE,
    DecodingFetcher,
    DecodingOptions,
    EncodedImages,
    fit_image_statistics,
)
from convolve.data.loader.in_memory import InMemoryFetcher
from convolve.data.loader.loader import Fetcher, Loader
from convolve.data.lookup import open_dataset
from convolve.data.transforms.augment import NO_AUGMENT, Augment, Crop
from convolve.data.transforms.mixup import NO_MIXING, Cutmix, Mixer, Mixing
from convolve.data.transforms.normalize import Transform, fit_transform
from convolve.errors import ConfigError
from convolve.loggers.base import Console

_CROPS: dict[str, Crop] = {"flip": "none", "pad-crop": "pad", "pad-crop-flip": "pad", "resized-crop-flip": "resized"}


def select_samples(dataset: Dataset, config: DataConfig) -> Dataset:
    """The data set without the held-out images, and with as much of the rest as is to be used."""
    held, count = config.hold_out, len(dataset.train)
    if held >= count:
        raise ConfigError(f"hold-out={held}: {dataset.name} has {count} training images; leave some to train on")
    used = count_used(count, config)
    rows = held + np.arange(used, dtype=np.int64) * (count - held) // used
    return Dataset(dataset.name, dataset.train.take(rows), dataset.test, dataset.classes, dataset.origin)


def count_used(count: int, config: DataConfig) -> int:
    """How many of `count` training images are left without the held-out ones and with the share that is to be used."""
    return max(1, math.floor((count - config.hold_out) * config.dataset_percentage_to_use / 100))


def fit_normalization(samples: Samples, config: DataConfig, model_size: int | None = None) -> Transform:
    """The transform for these samples; `model_size` is the side that the network is made for."""
    if isinstance(samples, Split):
        return fit_transform(samples, config.normalization, config.image_size)
    assert isinstance(samples, EncodedImages), "samples are in memory or in a gallery"
    return fit_image_statistics(samples, config.normalization, config.image_size or model_size or USUAL_PHOTO_SIZE)


def augment_of(config: DataConfig, samples: Samples) -> Augment:
    """What happens to training images; `auto` goes by what they are."""
    kind: str = config.augment
    if kind == "auto":
        color = isinstance(samples, Split) and samples.images.shape[3] == 3
        kind = "resized-crop-flip" if isinstance(samples, EncodedImages) else "pad-crop-flip" if color else "none"
    if config.train_with_valid_preprocessing:
        return NO_AUGMENT
    padded = _CROPS.get(kind) == "pad"
    if padded and isinstance(samples, EncodedImages):
        raise ConfigError(f"augment={kind}: it is for small images in memory; photographs take resized-crop-flip")
    if isinstance(samples, Split) and padded and config.padding_mode == "reflect":
        _check_reflection(config.crop_padding, min(samples.images.shape[1:3]))
    jitter = config.color_jitter
    return Augment(
        crop=_CROPS.get(kind, "none"),
        flip="none" if kind in ("none", "pad-crop") else config.flip,
        padding=config.crop_padding,
        padding_mode=config.padding_mode,
        area=config.crop_area,
        aspect=config.crop_aspect,
        cutout=config.cutout,
        erase_probability=config.erase_probability,
        jitter=jitter,
        layers=config.randaugment_layers,
        magnitude=config.randaugment_magnitude,
    )


def _check_reflection(padding: int, side: int) -> None:
    if padding >= side:
        raise ConfigError(f"crop-padding={padding}: images of {side} pixels reflect at most {side - 1}; set less")


def mixer_of(config: DataConfig) -> Mixer:
    """Mixup and cutmix as asked for."""
    cutmix: Cutmix | None = None
    if config.cutmix_lambda < 1:
        cutmix = Cutmix("random" if config.cutmix_version == "1" else "constant", config.cutmix_lambda)
    elif uses_uniform_cutmix(config):
        low, high = config.cutmix_lambda_low, config.cutmix_lambda_high
        cutmix = Cutmix("uniform", low=low, high=high, disable_probability=config.cutmix_disable_prob)
    if cutmix is None and not config.mixup_alpha:
        return NO_MIXING
    return Mixing(config.mixup_alpha, cutmix)


def uses_uniform_cutmix(config: DataConfig) -> bool:
    """Whether the range of uniform cutmix asks for any; (0, 0) and (1, 1) are off."""
    return (config.cutmix_lambda_low, config.cutmix_lambda_high) not in ((0.0, 0.0), (1.0, 1.0))


def open_train_loader(samples: Samples, transform: Transform, where: torch.device, config: DataConfig) -> Loader:
    """Augmented and mixed batches for training."""
    augment = augment_of(config, samples)
    return _open(samples, transform, where, (config, augment, mixer_of(config)))


def open_test_loader(samples: Samples, transform: Transform, where: torch.device, config: DataConfig) -> Loader:
    """Plain batches for evaluation."""
    return _open(samples, transform, where, (config, NO_AUGMENT, NO_MIXING))


def _open(
    samples: Samples, transform: Transform, where: torch.device, how: tuple[DataConfig, Augment, Mixer]
) -> Loader:
    config, augment, mixer = how
    site = torch.device("cpu") if config.hostside_norm else where
    stock: Fetcher
    if isinstance(samples, Split):
        stock = InMemoryFetcher(samples, transform, site, augment)
    else:
        assert isinstance(samples, EncodedImages), "samples are in memory or in a gallery"
        stock = DecodingFetcher(samples, transform, augment, decoding_options(config, len(samples)))
    return Loader(stock, transform, where, mixer, site)


def decoding_options(config: DataConfig, count: int) -> DecodingOptions:
    """Threads, memory and patience for pictures."""
    return DecodingOptions(
        workers=machine.available_threads() if config.workers is None else config.workers,
        cache_bytes=int(config.cache_memory * 1e9) if config.dataset_cache else 0,
        forgiven=math.floor(config.bad_samples_limit * count) if config.bad_samples == "skip" else 0,
    )


@dataclass(frozen=True)
class DataModule:
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


def load_dataset(config: Config, console: Console) -> Dataset:
    """The data set of a config, with the images that are not to be used left out of training."""
    return select_samples(open_dataset(config.data, announce=console.info, progress=console.progress), config.data)


def name_dataset(config: Config, name: str) -> Config:
    """The config with the data set that was really used, so that a repeat uses the same."""
    if config.data.generated_data or config.data.synthetic_data:
        return config
    return config.replace(dataset=name)
