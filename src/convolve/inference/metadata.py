"""The card of a trained network: what anybody needs who has the weights and nothing else.

It travels inside every exported file, so that a file alone is enough to classify a picture: the class names, the size
and normalization of the input, and how a picture becomes that input ("digit": centered as MNIST does it; "photo":
scaled and cut to the middle).

`convolve export`: a trained network as a file for other programs, proven before it gets its name.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from convolve import __version__
from convolve.data.transforms.normalize import Transform
from convolve.errors import CheckpointError
from convolve.runs.load import TrainedModel

FORMAT = 1
METADATA_KEY = "convolve"
_FITS = ("digit", "photo")


@dataclass(frozen=True)
class ModelMetadata:
    """Names and numbers that belong to the weights of one network."""

    model: str
    classes: tuple[str, ...]
    transform: Transform
    fit: str
    step: int
    convolve: str

    def to_json(self) -> str:
        """The card as one line of text."""
        return json.dumps({"format": FORMAT, **asdict(self), "transform": self.transform.to_json()}, sort_keys=True)

    def to_strings(self) -> dict[str, str]:
        """The card for readers without JSON: plain strings, the class names one to a line."""
        channels, height, width = self.transform.shape
        return {
            METADATA_KEY: self.to_json(),
            "classes": "\n".join(" ".join(name.split()) for name in self.classes),
            "shape": f"{height} {width} {channels}",
            "fit": self.fit,
            "crop": repr(self.transform.crop_share),
        }

    @classmethod
    def from_json(cls, text: str, where: str) -> "ModelMetadata":
        """The card in a text; `where` is the file, as a message should name it."""
        try:
            stored: Mapping[str, Any] = json.loads(text)
            if stored["format"] != FORMAT or stored["fit"] not in _FITS:
                raise ValueError(f"format {stored['format']}, fit {stored['fit']}")
            transform = Transform.from_json(stored["transform"])
            classes = tuple(str(name) for name in stored["classes"])
            return cls(
                str(stored["model"]),
                classes,
                transform,
                str(stored["fit"]),
                int(stored["step"]),
                str(stored["convolve"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{where}: its card cannot be read ({error}); export the run again") from None


def choose_fit(transform: Transform) -> str:
    """How pictures become the input of a network: square gray inputs are digits, all else photographs."""
    return "digit" if transform.channels == 1 and transform.height == transform.width else "photo"


def metadata_of(trained: TrainedModel) -> ModelMetadata:
    """The card of a trained network."""
    return ModelMetadata(
        trained.config.model.model,
        trained.classes,
        trained.transform,
        choose_fit(trained.transform),
        trained.step,
        __version__,
    )
