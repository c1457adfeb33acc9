"""The data set of a config that names none: that of its data folder, or the one that its model was made for."""

from convolve.config import Config
from convolve.data.lookup import infer_entry
from convolve.models import registry
from convolve.models.network import Shape
from convolve.models.spec import ModelSpec

IMAGENET, CIFAR = "imagenet", "cifar-10"
_SMALLEST_PHOTO = 64


def follow_data_and_model(config: Config) -> Config:
    """Return the config with its data set: a known one in `--data-dir`, or without a folder, that of the model.

    ImageNet for built-in models of photographs, CIFAR-10 for those of small color images. Other configs are unchanged:
    gray images are MNIST by default, and a folder of photographs needs no name.
    """
    if config.data.dataset is not None:
        return config
    if config.data.data_dir is not None:
        entry = infer_entry(config.data.data_dir)
        return config if entry is None else config.replace(dataset=entry.name)
    spec = registry.resolve(config.model.model, config.model)
    name = _dataset_of(spec.input_shape) if isinstance(spec, ModelSpec) else None
    return config if name is None else config.replace(dataset=name)


def _dataset_of(shape: Shape) -> str | None:
    channels, side, _ = shape
    if channels != 3:
        return None
    return IMAGENET if side >= _SMALLEST_PHOTO else CIFAR
