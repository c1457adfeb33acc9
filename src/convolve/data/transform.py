"""From stored pixels to the network's input; one description for training, validation, prediction and export.

The arithmetic: x = pixel * scale + shift for each channel, with scale = 1 / (255 std) and shift = -mean / std. It is
stored in every checkpoint, so a model always meets the input that it was trained on.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convolve.data.dataset import Split
from convolve.errors import CheckpointError

_FIXED = {"unit": (0.0, 1.0), "symmetric": (0.5, 0.5)}


@dataclass(frozen=True)
class Transform:
    """Input size and the normalisation of each channel."""

    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def channels(self) -> int:
        """Number of colour channels."""
        return len(self.mean)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return self.channels, self.height, self.width

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalise uint8 pixels [N, H, W, C] to float32 [N, C, H, W]; memory stays channels-last."""
        images = pixels.to(torch.float32)
        if self.channels == 1:
            images.mul_(1 / (255 * self.std[0])).add_(-self.mean[0] / self.std[0])
        else:
            images.mul_(images.new_tensor([1 / (255 * s) for s in self.std]))
            images.add_(images.new_tensor([-m / s for m, s in zip(self.mean, self.std, strict=True)]))
        return images.permute(0, 3, 1, 2)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Any) -> "Transform":
        """A transform from the plain values in a checkpoint."""
        try:
            mean, std = (tuple(float(x) for x in stored[key]) for key in ("mean", "std"))
            return cls(int(stored["height"]), int(stored["width"]), mean, std)
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"state.json: transform {stored!r:.80}: not a transform; use another checkpoint"
            ) from None


def fit_transform(split: Split, normalisation: str) -> Transform:
    """The transform that a normalisation means for the images of a split."""
    _, height, width, channels = split.images.shape
    if normalisation in _FIXED:
        mean, std = _FIXED[normalisation]
        return Transform(height, width, (mean,) * channels, (std,) * channels)
    # Histograms are exact, whatever the number of images.
    counts = np.stack([np.bincount(split.images[..., c].ravel(), minlength=256) for c in range(channels)])
    values = np.arange(256) / 255
    total = counts.sum(axis=1)
    means = (counts * values).sum(axis=1) / total
    deviations = np.sqrt((counts * (values - means[:, None]) ** 2).sum(axis=1) / total)
    return Transform(height, width, tuple(map(float, means)), tuple(float(max(d, 1e-6)) for d in deviations))
