"""Color jitter and RandAugment for whole batches [N, C, H, W] of pixels 0 to 255, one call per selected operation.

The operations and their ranges are a subset of RandAugment (Cubuk and others, 2019): magnitudes are 0 to 30, and the
direction of a rotation, shift or shear is random.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from convolve.rng import Indices, SampleRNG

Numbers = npt.NDArray[np.float64]
Operation = Callable[[Tensor, Tensor], Tensor]
MAX_MAGNITUDE = 30.0
_LUMA = (0.299, 0.587, 0.114)
_GRAY = 128.0


def jitter_colors(images: Tensor, numbers: Numbers, strength: tuple[float, float, float]) -> Tensor:
    """Change brightness, contrast and saturation by a factor from [1 - s, 1 + s] for each sample."""
    for index, operation in enumerate((_brighten, _contrast, _saturate)):
        if strength[index]:
            factors = 1 + strength[index] * (2 * numbers[:, index] - 1)
            images = operation(images, torch.from_numpy(factors.astype(np.float32)).to(images.device))
    return images


def randaugment(images: Tensor, samples: Indices, rng: SampleRNG, layers: int, magnitude: float) -> Tensor:
    """Apply one random operation at the given magnitude to every sample in each layer."""
    for layer in range(layers):
        numbers = rng.numbers(samples, 2, f"randaugment {layer}")
        chosen = (numbers[:, 0] * len(OPERATIONS)).astype(np.int64)
        signs = np.where(numbers[:, 1] < 0.5, -1.0, 1.0) * magnitude / MAX_MAGNITUDE
        strengths = torch.from_numpy(signs.astype(np.float32)).to(images.device)
        for index, operation in enumerate(OPERATIONS):
            rows = torch.from_numpy(np.flatnonzero(chosen == index)).to(images.device)
            if len(rows):
                changed = operation(images.index_select(0, rows), strengths.index_select(0, rows))
                images = images.index_copy(0, rows, changed)
    return images


def _each(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def _gray(images: Tensor) -> Tensor:
    if images.shape[1] == 1:
        return images
    red, green, blue = (images[:, index : index + 1] for index in range(3))
    return red * _LUMA[0] + green * _LUMA[1] + blue * _LUMA[2]


def _blend(images: Tensor, base: Tensor, factors: Tensor) -> Tensor:
    return (base + _each(factors) * (images - base)).clamp_(0, 255)


def _brighten(images: Tensor, factors: Tensor) -> Tensor:
    return (images * _each(factors)).clamp_(0, 255)


def _contrast(images: Tensor, factors: Tensor) -> Tensor:
    return _blend(images, _each(_gray(images).flatten(1).mean(1)), factors)


def _saturate(images: Tensor, factors: Tensor) -> Tensor:
    return _blend(images, _gray(images), factors)


def _sharpen(images: Tensor, factors: Tensor) -> Tensor:
    planes = functional.pad(images, (1, 1, 1, 1), mode="replicate")
    kernel = planes.new_tensor([[1, 1, 1], [1, 5, 1], [1, 1, 1]]).div_(13).expand(planes.shape[1], 1, 3, 3)
    return _blend(images, functional.conv2d(planes, kernel, groups=planes.shape[1]), factors)


def _enhance(operation: Operation) -> Operation:
    """Return an operation with a factor of 1 +- 0.9 at the highest magnitude."""
    return lambda images, strengths: operation(images, 1 + 0.9 * strengths)


def _identity(images: Tensor, strengths: Tensor) -> Tensor:
    return images


def _autocontrast(images: Tensor, strengths: Tensor) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) * (255 / (high - low).clamp(min=1)), images)


def _solarize(images: Tensor, strengths: Tensor) -> Tensor:
    return torch.where(images >= _each(255 * (1 - strengths.abs())), 255 - images, images)


def _posterize(images: Tensor, strengths: Tensor) -> Tensor:
    step = _each(2.0 ** torch.round(4 * strengths.abs()))
    return torch.floor(torch.floor(images) / step) * step


def _warp(images: Tensor, matrices: Tensor) -> Tensor:
    grid = functional.affine_grid(matrices, list(images.shape), align_corners=False)
    return functional.grid_sample(images - _GRAY, grid, align_corners=False) + _GRAY


def _matrices(strengths: Tensor) -> Tensor:
    return torch.eye(2, 3, device=strengths.device).repeat(len(strengths), 1, 1)


def _rotate(images: Tensor, strengths: Tensor) -> Tensor:
    angles, matrices = strengths * math.radians(30), _matrices(strengths)
    matrices[:, 0, 0] = matrices[:, 1, 1] = angles.cos()
    matrices[:, 0, 1], matrices[:, 1, 0] = -angles.sin(), angles.sin()
    return _warp(images, matrices)


def _entry(row: int, column: int, scale: float) -> Operation:
    """Return an operation that changes one entry of the matrix: a shear or a shift."""

    def change(images: Tensor, strengths: Tensor) -> Tensor:
        matrices = _matrices(strengths)
        matrices[:, row, column] = strengths * scale
        return _warp(images, matrices)

    return change


OPERATIONS: tuple[Operation, ...] = (
    _identity,
    _autocontrast,
    _solarize,
    _posterize,
    _enhance(_brighten),
    _enhance(_contrast),
    _enhance(_saturate),
    _enhance(_sharpen),
    _rotate,
    _entry(0, 1, 0.3),
    _entry(1, 0, 0.3),
    _entry(0, 2, 2 * 0.45),
    _entry(1, 2, 2 * 0.45),
)
