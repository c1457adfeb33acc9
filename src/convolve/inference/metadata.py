"""Metadata of a trained model: everything beyond the weights that classification needs.

Every exported file contains it, so a file alone is enough to classify an image: the class names, the size and
normalization of the input, and how an image is fitted to that input ("digit": centered as in MNIST; "photo": resized
and center-cropped).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convolve import __version__
from convolve.checkpoint.provenance import read_provenance
from convolve.data.transforms.normalize import Transform
from convolve.errors import CheckpointError
from convolve.inference.preprocess import InputSpec
from convolve.label_scores import DEFAULT_THRESHOLD

if TYPE_CHECKING:
    from convolve.runs.load import TrainedModel

FORMAT = 1
FORMAT_SEVERAL_LABELS = 2
METADATA_KEY = "convolve"
_FITS = ("digit", "photo")


@dataclass(frozen=True)
class ModelMetadata:
    """Class names and input format of one model. The field names are the JSON keys inside exported files.

    `weights` are name, source and license of the pretrained weights that training started from. `quantization` is that
    of an int8 file: the accuracy of the model (`float_accuracy`) and of the file on each engine (`accuracies`), on all
    `test_samples` images, in [0, 1].

    If images have several labels, `thresholds` are the probabilities from which on each label is predicted, and a
    probability is the sigmoid of a logit. Otherwise it is None, and probabilities are the softmax of the logits.
    """

    model: str
    classes: tuple[str, ...]
    transform: Transform
    fit: str
    step: int
    convolve: str
    weights: Mapping[str, str | None] | None = None
    quantization: Mapping[str, Any] | None = None
    thresholds: tuple[float, ...] | None = None

    @cached_property
    def input_spec(self) -> InputSpec:
        """How an image becomes the input of this model."""
        channels, height, width = self.transform.shape
        return InputSpec(self.fit, height, width, channels, self.transform.crop_fraction)

    def to_json(self) -> str:
        """Return one line of JSON."""
        fields = {**asdict(self), "transform": self.transform.to_json()}
        for name in ("weights", "quantization", "thresholds"):
            if fields[name] is None:
                del fields[name]
        # Versions that know one class per image only must not read a file with several labels.
        number = FORMAT if self.thresholds is None else FORMAT_SEVERAL_LABELS
        return json.dumps({"format": number, **fields}, sort_keys=True)

    def to_strings(self) -> dict[str, str]:
        """Return the metadata as plain strings for readers without a JSON parser, class names one per line."""
        channels, height, width = self.transform.shape
        return {
            METADATA_KEY: self.to_json(),
            "classes": "\n".join(" ".join(name.split()) for name in self.classes),
            "shape": f"{height} {width} {channels}",
            "fit": self.fit,
            "crop": repr(self.transform.crop_fraction),
            **({} if self.thresholds is None else {"thresholds": "\n".join(map(repr, self.thresholds))}),
        }

    @classmethod
    def from_json(cls, text: str, source: str) -> ModelMetadata:
        """Parse `to_json` output; `source` names the file in error messages."""
        try:
            stored: Mapping[str, Any] = json.loads(text)
            if stored["format"] not in (FORMAT, FORMAT_SEVERAL_LABELS) or stored["fit"] not in _FITS:
                raise ValueError(f"format {stored['format']}, fit {stored['fit']}")
            return cls(
                model=str(stored["model"]),
                classes=tuple(str(name) for name in stored["classes"]),
                transform=Transform.from_json(stored["transform"]),
                fit=str(stored["fit"]),
                step=int(stored["step"]),
                convolve=str(stored["convolve"]),
                weights=read_provenance(stored.get("weights")),
                quantization=_read_quantization(stored.get("quantization")),
                thresholds=_read_thresholds(stored.get("thresholds"), len(stored["classes"])),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{source}: cannot read its metadata ({error}); export the run again") from None


def _read_quantization(stored: Any) -> dict[str, Any] | None:
    if stored is None:
        return None
    accuracies = {str(name): float(value) for name, value in stored["accuracies"].items()}
    float_accuracy, count = float(stored["float_accuracy"]), int(stored["test_samples"])
    return {"float_accuracy": float_accuracy, "accuracies": accuracies, "test_samples": count}


def _read_thresholds(stored: Any, count: int) -> tuple[float, ...] | None:
    if stored is None:
        return None
    thresholds = tuple(float(value) for value in stored)
    if len(thresholds) != count or not all(0 <= value <= 1 for value in thresholds):
        raise ValueError(f"{len(thresholds)} thresholds for {count} labels")
    return thresholds


def read_metadata(strings: Mapping[str, str], path: Path) -> ModelMetadata:
    """Return the metadata in the string entries of an exported file."""
    if not strings.get(METADATA_KEY):
        raise CheckpointError(f"{path}: contains no convolve metadata; export the run with `convolve export`")
    return ModelMetadata.from_json(strings[METADATA_KEY], str(path))


def metadata_of(trained: TrainedModel) -> ModelMetadata:
    """Return the metadata of a trained model. Square gray inputs are digits, all others photos."""
    transform = trained.transform
    return ModelMetadata(
        model=trained.config.model.model,
        classes=trained.classes,
        transform=transform,
        fit="digit" if transform.channels == 1 and transform.height == transform.width else "photo",
        step=trained.step,
        convolve=__version__,
        weights=trained.weights,
        thresholds=_thresholds_of(trained),
    )


def _thresholds_of(trained: TrainedModel) -> tuple[float, ...] | None:
    """Return the thresholds of several labels; one half if the checkpoint was not validated."""
    if trained.task != "multi-label":
        return None
    return trained.thresholds or (DEFAULT_THRESHOLD,) * len(trained.classes)
