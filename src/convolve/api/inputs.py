"""The user's function from an image to the input of a model, in place of convolve's resizing and normalization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from convolve.errors import ConfigError, describe

Pixels = npt.NDArray[np.uint8]
_PIL_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class InputFunction:
    """A function of an image that returns a float tensor [C, H, W] of the shape that a model takes.

    It gets a PIL image with the number of channels of the model, or an array [H, W, C] if PIL has no such images.
    """

    function: Callable[[Any], Tensor]
    shape: tuple[int, int, int]

    def __call__(self, pixels: Pixels, name: str) -> Tensor:
        """Return the input for the pixels [H, W, C] of an image; `name` stands for it in messages."""
        given: Any = pixels
        if pixels.shape[2] in _PIL_CHANNELS:
            given = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
        try:
            found = self.function(given)
        except Exception as error:
            raise ConfigError(
                f"transform: failed for {name} ({describe(error)}); write transform(image) -> float tensor [C, H, W]"
            ) from error
        if not isinstance(found, Tensor) or not found.is_floating_point() or tuple(found.shape) != self.shape:
            kind = f"{found.dtype} {[*found.shape]}" if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(f"transform: returned {kind} for {name}; return a float tensor {[*self.shape]}")
        return found.detach().to("cpu", torch.float32)


def to_visible(image: Tensor) -> Pixels:
    """Return an input [C, H, W] as pixels [H, W, C] that can be shown: its smallest value is black."""
    low, high = image.min(), image.max()
    scaled = (image - low) / (high - low).clamp(min=1e-12) * 255
    return np.ascontiguousarray(scaled.round().to(torch.uint8).permute(1, 2, 0).numpy())
