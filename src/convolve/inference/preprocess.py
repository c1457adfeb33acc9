"""Fit any image to the input of a model. Imports no torch, so a sandbox that runs this starts quickly.

A digit is prepared as in MNIST: light ink on black, scaled into a 20/28 box and centered by its center of mass. A photo
is resized and center-cropped as in validation.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from convolve.data.image_io import Images, center_box

_LUMA = np.array((299, 587, 114), np.int64)
_INK_BOX = 20 / 28  # MNIST scales the ink into 20 of 28 pixels
_MIN_INK = 0.3


@dataclass(frozen=True)
class InputSpec:
    """Size of a model's input, and how an image is fitted to it: as a "digit" or as a "photo"."""

    fit: str
    height: int
    width: int
    channels: int
    crop_fraction: float


def preprocess(image: Images, spec: InputSpec, invert: bool | None = None) -> Images:
    """Return an image [H, W, C] of any size as model input.

    Args:
        invert: for digits, True if the ink is darker than the paper; None: detected from the border.
    """
    if spec.fit == "digit":
        return fit_digit(image, spec.height, invert)
    return fit_photo(image, spec)


def fit_photo(image: Images, spec: InputSpec) -> Images:
    """Center-crop the fraction of a photo that the input specifies, and resize it.

    An image that already has the input size is returned unchanged.
    """
    if image.shape[:2] == (spec.height, spec.width):
        return image
    top, left, height, width = center_box(image.shape[:2], spec.crop_fraction)
    crop = image[top : top + height, left : left + width]
    size = (spec.width, spec.height)
    if spec.channels == 3:
        return np.array(Image.fromarray(crop).resize(size, Image.Resampling.BILINEAR))
    # Pillow has no images of more channels, and weighs those of an RGBA image by its fourth.
    channels = (Image.fromarray(crop[..., channel]) for channel in range(spec.channels))
    return np.stack([np.array(channel.resize(size, Image.Resampling.BILINEAR)) for channel in channels], axis=2)


def fit_digit(image: Images, size: int, invert: bool | None) -> Images:
    """Return an image [H, W, C] of one digit as [size, size, 1], prepared as in MNIST.

    The paper becomes 0 and the ink keeps its contrast to the paper and its proportions. An image that already has the
    size and is light on dark is returned unchanged.

    Args:
        invert: True if the ink is darker than the paper; None: detected from the border.
    """
    gray = _to_gray(image)
    dark_on_light = _is_dark_on_light(gray) if invert is None else invert
    if gray.shape == (size, size) and not dark_on_light:
        return gray[..., np.newaxis]
    ink = _subtract_paper(255 - gray if dark_on_light else gray)
    return _center(_resize(_crop(ink), round(size * _INK_BOX)), size)[..., np.newaxis]


def _to_gray(image: Images) -> Images:
    if image.shape[2] == 1:
        return image[..., 0]
    return ((image.astype(np.int64) @ _LUMA + 500) // 1000).astype(np.uint8)


def _border(gray: Images) -> Images:
    return np.concatenate((gray[0], gray[-1], gray[1:-1, 0], gray[1:-1, -1]))


def _is_dark_on_light(gray: Images) -> bool:
    """Return True if most of the border is brighter than Otsu's threshold."""
    if gray.min() == gray.max():
        return bool(gray.flat[0] > 127)
    return float((_border(gray) > _otsu_threshold(gray)).mean()) > 0.5


def _otsu_threshold(gray: Images) -> int:
    """Return the threshold that maximizes the variance between the two classes (Otsu 1979)."""
    counts = np.bincount(gray.reshape(-1), minlength=256).astype(np.float64)
    below, total = np.cumsum(counts), float(gray.size)
    moment = np.cumsum(counts * np.arange(256))
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (moment[-1] * below - moment * total) ** 2 / (below * (total - below))
    return int(np.argmax(np.nan_to_num(between, nan=0.0, posinf=0.0)))


def _subtract_paper(gray: Images) -> Images:
    """Subtract the brightness of the paper, which is the median of the border."""
    paper = int(np.median(_border(gray)))
    return np.maximum(gray, paper) - np.uint8(paper)


def _crop(ink: Images) -> Images:
    """Crop to the bounding box of the ink. Noise as bright as that of the border is paper, not ink."""
    threshold = min(2.0 * float(np.percentile(_border(ink), 95)), _MIN_INK * float(ink.max()))
    rows, columns = np.nonzero(ink > threshold)
    if not len(rows):
        return ink
    return np.where(ink > threshold, ink, np.uint8(0))[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


def _resize(ink: Images, box: int) -> Images:
    """Resize the longer side to `box` pixels, keeping the maximum brightness."""
    height, width = ink.shape
    longer = max(height, width)
    if longer == box:
        return ink
    new_size = (max(round(width * box / longer), 1), max(round(height * box / longer), 1))
    resized = np.asarray(Image.fromarray(ink).resize(new_size, Image.Resampling.BICUBIC)).astype(np.float64)
    gain = float(ink.max()) / max(float(resized.max()), 1.0)
    return np.clip(np.rint(resized * gain), 0, 255).astype(np.uint8)


def _center(ink: Images, size: int) -> Images:
    """Place the ink on an empty square, its center of mass in the middle as far as the edges allow."""
    height, width = ink.shape
    weight = ink.astype(np.float64)
    total = weight.sum()
    row, column = (
        (weight.sum(1) @ np.arange(height) / total, weight.sum(0) @ np.arange(width) / total)
        if total
        else ((height - 1) / 2, (width - 1) / 2)
    )
    top = int(np.clip(np.rint(size / 2 - row), 0, size - height))
    left = int(np.clip(np.rint(size / 2 - column), 0, size - width))
    canvas = np.zeros((size, size), np.uint8)
    canvas[top : top + height, left : left + width] = ink
    return canvas
