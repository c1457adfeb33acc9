"""Normalize pixels: x = pixel * scale + shift for each channel, with scale = 1 / (255 std) and shift = -mean / std.

One `Transform` serves training, validation, prediction and export. It is stored in every checkpoint, so a model always
gets the input that it was trained on. Torch is imported on first use: a server of exported files needs only the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from convolve.data.image_io import MAX_CHANNELS, Images
from convolve.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_FIXED = {"unit": (0.0, 1.0), "symmetric": (0.5, 0.5)}
KEEP_VALUES = 1 / 255  # standard deviation that keeps the range of values
_ONLY_CENTERED = (KEEP_VALUES,) * 3
_LARGEST_SIDE = 4096
_PASS_IMAGES, _PASS_PIXELS = 256, 16 * 224 * 224


@dataclass(frozen=True)
class Transform:
    """Input size, normalization of each channel, and the fraction of an image's shorter side that is cropped."""

    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_fraction: float = 1.0

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return self.channels, self.height, self.width

    @property
    def pass_size(self) -> int:
        """Number of images of one forward pass in evaluation: more need gigabytes for activations, and a CPU is then
        slower, because they leave its caches."""
        return min(_PASS_IMAGES, max(1, _PASS_PIXELS // (self.height * self.width)))

    @property
    def takes_floats(self) -> bool:
        """Whether images are float tensors of the user's code, which are used as they are."""
        return {*self.mean, *self.std} == {0.0, KEEP_VALUES}

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalize pixels 0 to 255 [N, H, W, C] to float32 [N, C, H, W]; memory stays channels-last."""
        import torch

        images = pixels.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if self.channels == 1:
            images.mul_(1 / (255 * self.std[0])).add_(-self.mean[0] / self.std[0])
        else:
            # Whole lines of pixels in one operation: an inner loop over three channels is several times slower.
            lines = images.view(-1, images.shape[2] * self.channels)
            scales, shifts = _line_factors(self.mean, self.std, images.shape[2], images.device)
            lines.mul_(scales).add_(shifts)
        return images.permute(0, 3, 1, 2)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a checkpoint; the keys are part of its format."""
        size = {"height": self.height, "width": self.width}
        return {**size, "mean": self.mean, "std": self.std, "crop_share": self.crop_fraction}

    @classmethod
    def from_json(cls, stored: Any) -> Transform:
        """Return the transform of the plain values in a checkpoint."""
        try:
            mean, std = (tuple(float(x) for x in stored[key]) for key in ("mean", "std"))
            height, width, crop = int(stored["height"]), int(stored["width"]), float(stored.get("crop_share", 1.0))
            sizes = min(height, width) >= 1 and max(height, width) <= _LARGEST_SIDE and 0 < crop <= 1
            if not sizes or not 1 <= len(mean) <= MAX_CHANNELS or len(std) != len(mean) or not all(map(isfinite, mean)):
                raise ValueError("no such input")
            if not all(0 < value < _LARGEST_SIDE for value in std):
                raise ValueError("no standard deviation")
            return cls(height, width, mean, std, crop)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            raise CheckpointError(
                f"state.json: transform {stored!r:.80}: not a transform; use another checkpoint"
            ) from None


@cache
def _line_factors(
    mean: tuple[float, ...], std: tuple[float, ...], width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the scales and shifts of one line of pixels, copied to the device once."""
    import torch

    scales = torch.tensor([1 / (255 * s) for s in std], dtype=torch.float32)
    shifts = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], dtype=torch.float32)
    return scales.repeat(width).to(device), shifts.repeat(width).to(device)


def fit_channels(images: Images, normalization: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation of each channel that a normalization uses for these images [..., C]."""
    channels = images.shape[-1]
    if normalization in _FIXED:
        mean, std = _FIXED[normalization]
        return (mean,) * channels, (std,) * channels
    if normalization.startswith("imagenet"):
        if channels != 3:
            raise ConfigError(f"--normalization {normalization}: only for color images; use standard or symmetric")
        return IMAGENET_MEAN, IMAGENET_STD if normalization == "imagenet" else _ONLY_CENTERED
    # Histograms are exact for any number of images; in pieces, since counting widens the values to 64 bits.
    counts = np.zeros((channels, 256), np.int64)
    for piece in np.array_split(images, max(1, images.size >> 22)):
        counts += [np.bincount(piece[..., c].ravel(), minlength=256) for c in range(channels)]
    values = np.arange(256) / 255
    total = counts.sum(axis=1)
    means = (counts * values).sum(axis=1) / total
    stds = np.sqrt((counts * (values - means[:, None]) ** 2).sum(axis=1) / total)
    return tuple(map(float, means)), tuple(float(max(std, 1e-6)) for std in stds)
