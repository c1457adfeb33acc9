"""Recognize who published a file of weights, and return the model options and the input that they need.

What a file of weights does not say: the epsilon and momentum of norms, the padding, and the normalization and size of
images. They follow from the library, which its parameter names reveal, from timm's `config.json` beside the file, or
from its published name. Only a classifier of 1000 classes counts as trained on ImageNet.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convolve.checkpoint.naming import strip_prefixes
from convolve.checkpoint.weights_table import (
    TENSORFLOW_OPTIONS,
    TIMM_OPTIONS,
    Preprocessing,
    find_published,
    torchvision_options,
)
from convolve.config.schema import Normalization
from convolve.directory import read_regular
from convolve.errors import CheckpointError

IMAGENET_CLASSES = 1000
_MAX_CONFIG_BYTES = 1 << 20
# "classifier.3" is before "classifier.1": MobileNet v3 has both, and the last one counts.
_LAST_LAYERS = ("fc", "_fc", "classifier", "classifier.3", "classifier.1", "head.fc")
_NORMALIZATIONS: dict[tuple[tuple[float, ...], tuple[float, ...]], Normalization] = {
    ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)): "imagenet",
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)): "symmetric",
    ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)): "unit",
}


@dataclass(frozen=True)
class Origin:
    """Who published weights, and what they need; `preprocessing` is None if it is unknown."""

    library: str
    model_options: Mapping[str, Any] = field(default_factory=dict)
    preprocessing: Preprocessing | None = None
    license: str | None = None


UNKNOWN = Origin("unknown")


def recognize(path: Path, shapes: Mapping[str, Collection[int]], model: str, side: int) -> Origin:
    """Return the origin of a file with tensors of these shapes, for a model made for images of `side` pixels."""
    published = find_published(path.name)
    if published is not None:
        return Origin(published.origin, published.model_options, published.preprocessing, published.license)
    config = path.with_name("config.json")
    if config.is_file():
        return read_timm_config(config)
    shapes = {strip_prefixes(name): shape for name, shape in shapes.items()}
    origin = _recognize_names(set(shapes), path.name, model)
    if origin is UNKNOWN or count_classes(shapes) != IMAGENET_CLASSES:
        return origin
    ported_lite = model.startswith("efficientnet-lite") and origin.model_options == TENSORFLOW_OPTIONS
    normalization: Normalization = "symmetric" if ported_lite else "imagenet"
    preprocessing = Preprocessing(normalization, side, 0.875, "bilinear")
    return Origin(origin.library, origin.model_options, preprocessing)


def _recognize_names(names: set[str], file: str, model: str) -> Origin:
    if "_conv_stem.weight" in names:
        return Origin("TensorFlow port", TENSORFLOW_OPTIONS)
    if "conv_stem.weight" in names:
        return Origin("timm", TENSORFLOW_OPTIONS if file.startswith("tf_") else TIMM_OPTIONS)
    if {"conv1.weight", "layer1.0.conv1.weight", "fc.weight"} <= names:
        return Origin("torchvision or timm", TIMM_OPTIONS)
    if "features.0.0.weight" in names and any(name.startswith("classifier.") for name in names):
        return Origin("torchvision", torchvision_options(model))
    return UNKNOWN


def count_classes(shapes: Mapping[str, Collection[int]]) -> int | None:
    """Return the number of outputs of the classifier in a file of weights; None if it has none."""
    plain = {strip_prefixes(name): tuple(shape) for name, shape in shapes.items()}
    found = (plain.get(f"{name}.weight", ()) for name in _LAST_LAYERS)
    return next((shape[0] for shape in found if len(shape) > 1), None)


def read_timm_config(path: Path) -> Origin:
    """Return what timm's `config.json` of a repository states."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes")
        stored = json.loads(read_regular(path))
        pretrained = stored["pretrained_cfg"]
        mean, std = (tuple(float(value) for value in pretrained[key]) for key in ("mean", "std"))
        side, crop = int(pretrained["input_size"][1]), float(pretrained["crop_pct"])
        license_ = pretrained.get("license")
        architecture = str(stored["architecture"])
        interpolation = str(pretrained.get("interpolation", "bilinear"))
    except (OSError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a config of timm ({error}); remove it or use another file") from None
    if (mean, std) not in _NORMALIZATIONS or not 0 < crop <= 1 or not 1 <= side <= 4096:
        raise CheckpointError(
            f"{path}: mean {mean}, standard deviation {std}, crop {crop:g} of {side} pixels: not supported; "
            "use other weights"
        )
    options = TENSORFLOW_OPTIONS if architecture.startswith("tf_") else TIMM_OPTIONS
    preprocessing = Preprocessing(_NORMALIZATIONS[mean, std], side, crop, interpolation)
    return Origin("timm", options, preprocessing, None if license_ is None else str(license_))
