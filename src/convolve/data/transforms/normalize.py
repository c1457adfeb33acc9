"""From stored pixels to the network's input; one description for training, validation, prediction and export.

The arithmetic: x = pixel * scale + shift for each channel, with scale = 1 / (255 std) and shift = -mean / std. It is
stored in every checkpoint, so a model always meets the input that it was trained on.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convolve.data.dataset import Images, Split
from convolve.errors import CheckpointError, ConfigError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_FIXED = {"unit": (0.0, 1.0), "symmetric": (0.5, 0.5)}
_ONLY_CENTERED = (1 / 255,) * 3  # pixels keep their range of 255


@dataclass(frozen=True)
class Transform:
    """Input size, the normalization of each channel, and the share of a picture's shorter side that is looked at."""

    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_share: float = 1.0

    @property
    def channels(self) -> int:
        """Number of color channels."""
        return len(self.mean)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return self.channels, self.height, self.width

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalize pixels 0 to 255 [N, H, W, C] to float32 [N, C, H, W]; memory stays channels-last."""
        images = pixels.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if self.channels == 1:
            images.mul_(1 / (255 * self.std[0])).add_(-self.mean[0] / self.std[0])
        else:
            # Whole lines of pixels at once: an inner loop over three channels would cost several times as much.
            lines = images.view(-1, images.shape[2] * self.channels)
            lines.mul_(images.new_tensor([1 / (255 * s) for s in self.std]).repeat(images.shape[2]))
            shifts = images.new_tensor([-m / s for m, s in zip(self.mean, self.std, strict=True)])
            lines.add_(shifts.repeat(images.shape[2]))
        return images.permute(0, 3, 1, 2)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Any) -> "Transform":
        """A transform from the plain values in a checkpoint."""
        try:
            mean, std = (tuple(float(x) for x in stored[key]) for key in ("mean", "std"))
            return cls(int(stored["height"]), int(stored["width"]), mean, std, float(stored.get("crop_share", 1.0)))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"state.json: transform {stored!r:.80}: not a transform; use another checkpoint"
            ) from None


def fit_transform(split: Split, normalization: str, size: int | None = None) -> Transform:
    """The transform that a normalization means for the images of a split, at their own size or another one."""
    _, height, width, channels = split.images.shape
    mean, std = fit_channels(split.images, normalization)
    assert len(mean) == channels, f"{len(mean)} means for {channels} channels"
    return Transform(size or height, size or width, mean, std)


def fit_channels(images: Images, normalization: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel that a normalization means for these images [..., C]."""
    channels = images.shape[-1]
    if normalization in _FIXED:
        mean, std = _FIXED[normalization]
        return (mean,) * channels, (std,) * channels
    if normalization.startswith("imagenet"):
        if channels != 3:
            raise ConfigError(f"normalization={normalization}: it is for color images; set standard or symmetric")
        return IMAGENET_MEAN, IMAGENET_STD if normalization == "imagenet" else _ONLY_CENTERED
    # Histograms are exact, whatever the number of images; in pieces, since counting widens the values to 64 bits.
    counts = np.zeros((channels, 256), np.int64)
    for piece in np.array_split(images, max(1, images.size >> 22)):
        counts += [np.bincount(piece[..., c].ravel(), minlength=256) for c in range(channels)]
    values = np.arange(256) / 255
    total = counts.sum(axis=1)
    means = (counts * values).sum(axis=1) / total
    deviations = np.sqrt((counts * (values - means[:, None]) ** 2).sum(axis=1) / total)
    return tuple(map(float, means)), tuple(float(max(d, 1e-6)) for d in deviations)
