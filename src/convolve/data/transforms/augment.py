"""Augmentation: boxes of random crops for any image, and crops, flips, cutout and erasing for whole batches.

Every random number is keyed by (seed, epoch, sample). A batch takes a few gathers and fused operations, never a loop
over images. Crops, flips and cutout keep bytes; resampling and colors result in floats of 0 to 255, which `Transform`
accepts as well.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from convolve.data.image_io import Box
from convolve.data.transforms.randaugment import jitter_colors, randaugment
from convolve.rng import Indices, SampleRNG

Range: TypeAlias = tuple[float, float]
ATTEMPTS = 10
NUMBERS = 4 * ATTEMPTS


def draw_box(numbers: list[float], size: tuple[int, int], area: Range, aspect: Range) -> Box:
    """Return top, left, height and width of a random crop. Its fraction of the area and its aspect ratio are drawn up
    to ten times until it fits; failing that, the largest centered box of an allowed aspect ratio is used.

    Args:
        numbers: `NUMBERS` doubles in [0, 1).
    """
    for attempt in range(ATTEMPTS):
        box = _attempt(numbers[4 * attempt : 4 * attempt + 4], size, area, aspect)
        if box is not None:
            return box
    return _largest(size, aspect)


def draw_box_on(
    numbers: list[float], size: tuple[int, int], area: Range, aspect: Range, objects: npt.NDArray[np.float32]
) -> Box:
    """Return a random crop with at least a tenth of one of the objects [K, 4] (left, top, right, bottom, as fractions
    of the image), or the largest centered box if no attempt has one."""
    for attempt in range(ATTEMPTS):
        box = _attempt(numbers[4 * attempt : 4 * attempt + 4], size, area, aspect)
        if box is not None and _covers(box, size, objects):
            return box
    return _largest(size, aspect)


def _attempt(numbers: list[float], size: tuple[int, int], area: Range, aspect: Range) -> Box | None:
    height, width = size
    pixels = height * width * (area[0] + (area[1] - area[0]) * numbers[0])
    low, high = math.log(aspect[0]), math.log(aspect[1])
    ratio = math.exp(low + (high - low) * numbers[1])
    columns, rows = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
    if not (0 < rows <= height and 0 < columns <= width):
        return None
    return int(numbers[2] * (height - rows + 1)), int(numbers[3] * (width - columns + 1)), rows, columns


def _covers(box: Box, size: tuple[int, int], objects: npt.NDArray[np.float32]) -> bool:
    top, left, rows, columns = box
    sides = np.array((size[1], size[0], size[1], size[0]))
    for x1, y1, x2, y2 in (objects * sides).tolist():
        shown = max(0.0, min(x2, left + columns) - max(x1, left)) * max(0.0, min(y2, top + rows) - max(y1, top))
        if shown >= 0.1 * max((x2 - x1) * (y2 - y1), 1.0):
            return True
    return False


def _largest(size: tuple[int, int], aspect: Range) -> Box:
    height, width = size
    rows, columns = height, width
    if width / height < aspect[0]:
        rows = max(1, min(height, round(width / aspect[0])))
    elif width / height > aspect[1]:
        columns = max(1, min(width, round(height * aspect[1])))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def draw_boxes(
    numbers: npt.NDArray[np.float64], size: tuple[int, int], area: Range, aspect: Range
) -> npt.NDArray[np.int64]:
    """Return the boxes [N, 4] of `draw_box` for many images of one size, from numbers [N, `NUMBERS`]."""
    return np.array([draw_box(row, size, area, aspect) for row in numbers.tolist()], np.int64).reshape(-1, 4)


Crop = Literal["none", "pad", "resized"]
Flip = Literal["none", "random", "alternating"]
PaddingMode = Literal["mean", "black", "reflect"]


PixelsFn = Callable[[Tensor, Indices, SampleRNG], Tensor]


def keep_pixels(pixels: Tensor, samples: Indices, rng: SampleRNG) -> Tensor:
    """Change nothing."""
    return pixels


@dataclass(frozen=True)
class Augment:
    """Augmentation of training images; the defaults do nothing. `own` is that of the user's code."""

    crop: Crop = "none"
    flip: Flip = "none"
    padding: int = 4
    padding_mode: PaddingMode = "mean"
    area: Range = (0.08, 1.0)
    aspect: Range = (3 / 4, 4 / 3)
    cutout: int = 0
    erase_probability: float = 0.0
    jitter: tuple[float, float, float] = (0.0, 0.0, 0.0)
    layers: int = 0
    magnitude: float = 9.0
    own: PixelsFn = keep_pixels

    def colors(self, pixels: Tensor, samples: Indices, rng: SampleRNG) -> Tensor:
        """Apply the user's augmentation, RandAugment and color jitter."""
        pixels = self.own(pixels, samples, rng)
        if not self.layers and not any(self.jitter):
            return pixels
        images = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        images = randaugment(images, samples, rng, self.layers, self.magnitude)
        return jitter_colors(images, rng.numbers(samples, 3, "colors"), self.jitter).permute(0, 2, 3, 1)

    def cut(self, pixels: Tensor, samples: Indices, rng: SampleRNG, fill: Tensor) -> Tensor:
        """Fill a square around a random position (cutout), or a random rectangle with a probability (erase)."""
        if self.cutout:
            numbers = rng.numbers(samples, 2, "cutout")
            pixels = _fill(pixels, _squares(numbers, pixels.shape[1:3], self.cutout), fill)
        if self.erase_probability:
            numbers = rng.numbers(samples, 5, "erase")
            pixels = _fill(pixels, _rectangles(numbers, pixels.shape[1:3], self.erase_probability), fill)
        return pixels


NO_AUGMENT = Augment()


def pad_images(images: Tensor, padding: int, mode: PaddingMode, fill: Tensor) -> Tensor:
    """Return images [N, H, W, C] with a margin; with it, every crop is a gather."""
    count, height, width, channels = images.shape
    if mode == "reflect":
        rows, columns = (_reflect(side, padding).to(images.device) for side in (height, width))
        return images.index_select(1, rows).index_select(2, columns)
    shape = (count, height + 2 * padding, width + 2 * padding, channels)
    padded = (fill if mode == "mean" else torch.zeros_like(fill)).expand(shape).contiguous()
    padded[:, padding : padding + height, padding : padding + width] = images
    return padded


def _reflect(side: int, padding: int) -> Tensor:
    indices = torch.arange(-padding, side + padding).abs()
    return torch.where(indices >= side, 2 * (side - 1) - indices, indices)


def crop_padded(padded: Tensor, rows: Tensor, corners: Tensor, size: tuple[int, int]) -> Tensor:
    """Return crops of `size` at `corners` [N, 2] of padded images; every line of pixels is one gathered piece."""
    _, _, columns, channels = padded.shape
    height, width = size
    line, wide = columns * channels, width * channels
    flat = padded.view(-1)
    pieces = flat.as_strided((flat.numel() - wide + 1, wide), (1, 1))
    starts = rows * padded.stride(0) + corners[:, 0] * line + corners[:, 1] * channels
    starts = starts[:, None] + torch.arange(height, device=rows.device) * line
    return pieces.index_select(0, starts.view(-1)).view(-1, height, width, channels)


def flip_images(pixels: Tensor, chosen: Tensor) -> Tensor:
    """Mirror the chosen images from left to right."""
    rows = chosen.nonzero().flatten()
    if len(rows):
        pixels.index_copy_(0, rows, pixels.index_select(0, rows).flip(2))
    return pixels


def crop_and_resize(pixels: Tensor, numbers: "np.typing.NDArray[np.float64]", augment: Augment) -> Tensor:
    """Return random crops resized to the size of the batch, as floats."""
    count, height, width, _ = pixels.shape
    boxes = torch.from_numpy(draw_boxes(numbers, (height, width), augment.area, augment.aspect)).to(pixels.device)
    top, left, rows, columns = boxes.float().unbind(1)
    theta = torch.zeros(count, 2, 3, device=pixels.device)
    theta[:, 0, 0], theta[:, 0, 2] = columns / width, (2 * left + columns) / width - 1
    theta[:, 1, 1], theta[:, 1, 2] = rows / height, (2 * top + rows) / height - 1
    images = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    grid = functional.affine_grid(theta, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False).permute(0, 2, 3, 1)


def _squares(
    numbers: "np.typing.NDArray[np.float64]", size: tuple[int, ...], side: int
) -> "np.typing.NDArray[np.int64]":
    """Return boxes [N, 4] of a square around any position in the image; it may extend beyond the image."""
    center = (numbers * np.array(size)).astype(np.int64)
    start = center - side // 2
    return np.concatenate((start, start + side), axis=1)


def _rectangles(
    numbers: "np.typing.NDArray[np.float64]", size: tuple[int, ...], probability: float
) -> "np.typing.NDArray[np.int64]":
    """Return boxes [N, 4] of 2 to 33 % of the area with aspect ratios 0.3 to 3.3; empty for samples not selected."""
    height, width = size
    area = (0.02 + (0.33 - 0.02) * numbers[:, 1]) * height * width
    aspect = np.exp(np.log(0.3) + (np.log(3.3) - np.log(0.3)) * numbers[:, 2])
    rows = np.minimum(np.rint(np.sqrt(area * aspect)), height).astype(np.int64)
    columns = np.minimum(np.rint(np.sqrt(area / aspect)), width).astype(np.int64)
    rows[numbers[:, 0] >= probability] = 0
    top = (numbers[:, 3] * (height - rows + 1)).astype(np.int64)
    left = (numbers[:, 4] * (width - columns + 1)).astype(np.int64)
    return np.stack((top, left, top + rows, left + columns), axis=1)


def _fill(pixels: Tensor, boxes: "np.typing.NDArray[np.int64]", fill: Tensor) -> Tensor:
    """Fill each box [top, left, bottom, right] with one color, whole lines of pixels in one operation."""
    count, height, width, channels = pixels.shape
    top, left, bottom, right = torch.from_numpy(boxes).to(pixels.device)[:, :, None].unbind(1)
    down = torch.arange(height, device=pixels.device)
    across = torch.arange(width * channels, device=pixels.device).div(channels, rounding_mode="floor")
    rows, columns = (down >= top) & (down < bottom), (across >= left) & (across < right)
    inside = rows[:, :, None] & columns[:, None, :]
    colors = fill.to(pixels.dtype).repeat(width)
    return torch.where(inside, colors, pixels.reshape(count, height, -1)).view(pixels.shape)
