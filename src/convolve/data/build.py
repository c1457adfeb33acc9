"""Build the data of a run from the data section of a config: samples, normalization, augmentation and loaders."""

import math
from dataclasses import dataclass, replace
from typing import get_args
from zlib import crc32

import numpy as np
import torch

from convolve import device as machine
from convolve.config import Config
from convolve.config.schema import AugmentName, DataConfig
from convolve.data.dataset import Dataset, Reader
from convolve.data.loader.decoding import DecodingOptions
from convolve.data.loader.loader import Loader
from convolve.data.lookup import open_dataset
from convolve.data.sampling import Sampler, build_sampler, find_strata
from convolve.data.transforms.augment import NO_AUGMENT, Augment, Crop, PixelsFn, keep_pixels
from convolve.data.transforms.mixup import NO_MIXING, Cutmix, Mixing, MixPlanner
from convolve.data.transforms.normalize import Transform
from convolve.data.transforms.user import UserAugment, select_augment
from convolve.data.user import set_task
from convolve.errors import ConfigError, DataError
from convolve.loggers.base import Console

_CROPS: dict[str, Crop] = {
    "flip": "none",
    "pad-crop": "pad",
    "pad-crop-flip": "pad",
    "resized-crop-flip": "resized",
    "resized-crop": "resized",
}


def select_samples(dataset: Dataset[Reader], config: DataConfig) -> Dataset[Reader]:
    """Return the data set without the held-out training images, and with the fraction of the rest that is used."""
    held, count = config.hold_out, len(dataset.train)
    if not count:
        return dataset
    if held >= count:
        raise ConfigError(f"--hold-out {held}: {dataset.name} has {count} training images; leave some to train on")
    used = count_used(count, config)
    rows = held + np.arange(used, dtype=np.int64) * (count - held) // used
    dataset = replace(dataset, train=dataset.train.take(rows))
    if not config.validation_fraction or dataset.validation is not None:
        return dataset
    return _set_validation_aside(dataset, config.validation_fraction)


def _set_validation_aside(dataset: Dataset[Reader], fraction: float) -> Dataset[Reader]:
    """Move a fraction of each class from the training to the validation split, at least one image of it.

    The rank of a hash decides, not the seed: all runs on the same images select on the same ones.
    """
    labels = find_strata(dataset.train.labels)
    order = np.array([crc32(f"validation {row}".encode()) for row in range(len(labels))])
    chosen = np.zeros(len(labels), np.bool_)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        if len(rows) > 1:
            chosen[rows[np.argsort(order[rows], kind="stable")][: max(1, round(fraction * len(rows)))]] = True
    if not chosen.any() or chosen.all():
        raise ConfigError(
            f"--validation-fraction {fraction:g}: {dataset.name} has {len(labels)} training images, too few to split; "
            "omit it"
        )
    train, validation = (dataset.train.take(np.flatnonzero(rows)) for rows in (~chosen, chosen))
    return replace(dataset, train=train, validation=validation)


def count_used(count: int, config: DataConfig) -> int:
    """Return how many of `count` training images are used for training."""
    return max(1, math.floor((count - config.hold_out) * config.dataset_percentage_to_use / 100))


def fit_normalization(reader: Reader, config: DataConfig, model_size: int | None = None) -> Transform:
    """Return the transform of the normalization of a config; `model_size` is the input size of the model."""
    transform = reader.fit_transform(config.normalization or "unit", config.image_size, model_size)
    if config.crop_fraction is None or reader.image_shape is not None:
        return transform
    return replace(transform, crop_fraction=config.crop_fraction)


def build_augment(config: DataConfig, reader: Reader, given: UserAugment | None = None) -> Augment:
    """Return the augmentation of training images; `auto` depends on the kind of images.

    That of the user's code replaces padded crops and flips. Photographs are cropped at random before it.
    """
    kind: str = config.augment
    shape = reader.image_shape
    if kind == "auto":
        kind = "resized-crop-flip" if shape is None else "pad-crop-flip" if shape[2] >= 3 else "none"
    if config.train_with_valid_preprocessing:
        return NO_AUGMENT
    own: PixelsFn = keep_pixels
    if kind not in get_args(AugmentName):
        own = select_augment(kind, given)
        kind = "resized-crop" if shape is None else "none"
    _check_colors(config, shape)
    if _CROPS.get(kind) == "pad":
        _check_padding(kind, config, shape)
    return Augment(
        crop=_CROPS.get(kind, "none"),
        flip=config.flip if kind.endswith("flip") else "none",
        padding=config.crop_padding,
        padding_mode=config.padding_mode,
        area=config.crop_area,
        aspect=config.crop_aspect,
        cutout=config.cutout,
        erase_probability=config.erase_probability,
        jitter=config.color_jitter,
        layers=config.randaugment_layers,
        magnitude=config.randaugment_magnitude,
        own=own,
    )


def _check_colors(config: DataConfig, shape: tuple[int, int, int] | None) -> None:
    channels = 3 if shape is None else shape[2]
    given = {"--color-jitter": any(config.color_jitter), "--randaugment-layers": bool(config.randaugment_layers)}
    if channels not in (1, 3) and any(given.values()):
        option = next(option for option, used in given.items() if used)
        raise ConfigError(f"{option}: changes colors, but the images have {channels} channels; omit it")


def _check_padding(kind: str, config: DataConfig, shape: tuple[int, int, int] | None) -> None:
    if shape is None:
        raise ConfigError(f"--augment {kind}: only for small images in memory; use resized-crop-flip for photographs")
    padding, side = config.crop_padding, min(shape[:2])
    if config.padding_mode == "reflect" and padding >= side:
        raise ConfigError(f"--crop-padding {padding}: images of {side} pixels reflect at most {side - 1}; set less")


def build_mixing(config: DataConfig) -> MixPlanner:
    """Return mixup and cutmix as configured."""
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
    """Check for a range of uniform cutmix; (0, 0) and (1, 1) are off."""
    return (config.cutmix_lambda_low, config.cutmix_lambda_high) not in ((0.0, 0.0), (1.0, 1.0))


@dataclass(frozen=True)
class Training:
    """What training does to samples; by default nothing, as in validation."""

    augment: Augment = NO_AUGMENT
    mixing: MixPlanner = NO_MIXING
    sampler: Sampler | None = None


def open_train_loader(
    reader: Reader,
    transform: Transform,
    device: torch.device,
    config: DataConfig,
    own: UserAugment | None = None,
) -> Loader:
    """Return a loader of augmented and mixed batches, in the order of the sampler."""
    order = build_sampler(config.sampler, reader.labels)
    augment = build_augment(config, reader, own)
    return _open(reader, transform, device, config, Training(augment, build_mixing(config), order))


def open_test_loader(reader: Reader, transform: Transform, device: torch.device, config: DataConfig) -> Loader:
    """Return a loader of plain batches."""
    return _open(reader, transform, device, config, Training())


def _open(
    reader: Reader,
    transform: Transform,
    device: torch.device,
    config: DataConfig,
    training: Training,
) -> Loader:
    site = torch.device("cpu") if config.hostside_norm else device
    fetcher = reader.fetcher(transform, training.augment, site, decoding_options(config, len(reader)))
    return Loader(fetcher, transform, device, training.mixing, site, training.sampler)


def decoding_options(config: DataConfig, count: int) -> DecodingOptions:
    """Return threads, cache size and limit of broken images for `count` encoded images."""
    return DecodingOptions(
        workers=machine.available_threads() if config.workers is None else config.workers,
        cache_bytes=int(config.cache_memory * 1e9) if config.dataset_cache else 0,
        max_bad_samples=_max_bad_samples(config, count),
    )


def _max_bad_samples(config: DataConfig, count: int) -> int:
    """Return how many images may be skipped: the fraction of --bad-samples-limit, or one in a small folder."""
    if config.bad_samples == "error" or config.bad_samples_limit == 0:
        return 0
    return max(1, math.floor(config.bad_samples_limit * count))


def without_augmentation(config: DataConfig) -> DataConfig:
    """Return the options of a run that apply to plain images: threads, cache, broken images."""
    names = ("workers", "dataset_cache", "cache_memory", "bad_samples", "bad_samples_limit", "hostside_norm")
    return DataConfig(augment="none", **{name: getattr(config, name) for name in names})


@dataclass(frozen=True)
class DataModule:
    """A data set, its normalization, the device of its batches, and the options of its loaders.

    `augment` is an object of the user's code.
    """

    dataset: Dataset[Reader]
    transform: Transform
    device: torch.device
    options: DataConfig = DataConfig(augment="none")
    augment: UserAugment | None = None

    def train_loader(self) -> Loader:
        return open_train_loader(self.dataset.train, self.transform, self.device, self.options, self.augment)

    def test_loader(self) -> Loader:
        return open_test_loader(self.dataset.test, self.transform, self.device, self.options)

    def validation_loader(self) -> Loader:
        """Return the images that select the best checkpoint: the validation split, or the test split without one."""
        reader = self.dataset.test if self.dataset.validation is None else self.dataset.validation
        return open_test_loader(reader, self.transform, self.device, self.options)


def load_dataset(
    config: Config, console: Console, user: Dataset[Reader] | None = None, *, train: bool = True
) -> Dataset[Reader]:
    """Open the data set of a config, or take the user's, with the training images that the config selects; without
    `train`, those of a folder are not read."""
    if user is None and ":" in (config.data.dataset or ""):
        raise DataError(
            f"data set {config.data.dataset}: the user's code, which is never imported; give it again with data="
        )
    if user is not None:
        return select_samples(set_task(user, config.data.task), config.data)
    dataset = open_dataset(
        config.data, announce=console.info, progress=console.progress, train=train, least=config.global_batch_size
    )
    return select_samples(dataset, config.data)


def name_dataset(config: Config, name: str) -> Config:
    """Return the config with the data set that was actually used, so a repetition uses the same."""
    if config.data.generated_data or config.data.synthetic_data:
        return config
    return config.replace(dataset=name)
