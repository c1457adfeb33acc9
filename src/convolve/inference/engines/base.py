"""The interface of inference engines and their names."""

from importlib.util import find_spec
from typing import Protocol

import numpy as np
import numpy.typing as npt

from convolve.errors import ConfigError, ExtraError, suggest

Pixels = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]
AUTO = "auto"
ENGINES = ("torch", "onnxruntime", "openvino", "aoti")
CHOICES = (AUTO, *ENGINES)
# Engines that are compiled for one batch size; another one needs another engine.
COMPILED_FOR_SIZE = ("openvino",)
_EXTRAS = {"onnxruntime": "export", "openvino": "openvino"}


class Engine(Protocol):
    """A model that maps uint8 pixels [N, H, W, C] with any N to float32 logits [N, classes].

    `run` may be called by several threads. The array that it returns belongs to the caller.
    """

    @property
    def name(self) -> str:
        """Name of the engine, as in `--engine`."""

    @property
    def version(self) -> str:
        """Version of the package that computes."""

    def run(self, pixels: Pixels) -> Logits:
        """Return the logits of a batch."""


def describe(engine: Engine) -> str:
    """Return name and version of an engine."""
    return f"{engine.name} {engine.version}"


def check_name(name: str) -> None:
    """Reject an unknown engine, and one whose package is not installed."""
    if name not in CHOICES:
        raise ConfigError(f"--engine {name}: unknown engine; {suggest(name, CHOICES)}")
    if not is_installed(name):
        raise ExtraError(f"--engine {name}", _EXTRAS[name])


def is_installed(name: str) -> bool:
    """Return True if the package of an engine is installed, without importing it."""
    return name not in _EXTRAS or find_spec(name) is not None
