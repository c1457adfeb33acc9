"""Single pictures for prediction: any common image file as uint8 pixels, and a digit in the form of MNIST.

From the picture that somebody gives to the pixels that a network was trained on.
"""

import numpy as np
from PIL import Image

from convolve.data.dataset import Images
from convolve.data.transforms.augment import center_box
from convolve.data.transforms.normalize import Transform
from convolve.inference.metadata import ModelMetadata

_LUMA = np.array((299, 587, 114), np.int64)
_INK_BOX = 20 / 28  # MNIST keeps the ink in 20 of 28 pixels
_MIN_INK = 0.3


def fit_digit(image: Images, size: int, invert: bool | None) -> Images:
    """A picture [H, W, C] of one digit as [size, size, 1], light on dark, as MNIST prepares its digits.

    The paper becomes 0, the ink keeps its contrast to the paper and its proportions, fills 20/28 of the size and is
    centered by its center of mass. A picture that already has the size and is light on dark is returned as it is.

    Args:
        invert: whether the ink is darker than the paper; None: found out from the border.
    """
    gray = _to_gray(image)
    dark_on_light = _is_dark_on_light(gray) if invert is None else invert
    if gray.shape == (size, size) and not dark_on_light:
        return gray[..., np.newaxis]
    ink = _lift_ink(255 - gray if dark_on_light else gray)
    return _place(_scale(_crop(ink), round(size * _INK_BOX)), size)[..., np.newaxis]


def _to_gray(image: Images) -> Images:
    if image.shape[2] == 1:
        return image[..., 0]
    return ((image.astype(np.int64) @ _LUMA + 500) // 1000).astype(np.uint8)


def _border(gray: Images) -> Images:
    return np.concatenate((gray[0], gray[-1], gray[1:-1, 0], gray[1:-1, -1]))


def _is_dark_on_light(gray: Images) -> bool:
    """Whether most of the border is on the brighter side of the best cut between the picture's two shades."""
    if gray.min() == gray.max():
        return bool(gray.flat[0] > 127)
    return float((_border(gray) > _find_cut(gray)).mean()) > 0.5


def _find_cut(gray: Images) -> int:
    """Otsu's threshold: the cut that separates two shades best."""
    counts = np.bincount(gray.reshape(-1), minlength=256).astype(np.float64)
    below, total = np.cumsum(counts), float(gray.size)
    moment = np.cumsum(counts * np.arange(256))
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (moment[-1] * below - moment * total) ** 2 / (below * (total - below))
    return int(np.argmax(np.nan_to_num(between, nan=0.0, posinf=0.0)))


def _lift_ink(gray: Images) -> Images:
    """Brightness above the paper, which is what most of the border shows."""
    paper = int(np.median(_border(gray)))
    return np.maximum(gray, paper) - np.uint8(paper)


def _crop(ink: Images) -> Images:
    """The box around the ink; paper grain, as seen at the border, does not count as ink."""
    faintest = min(2.0 * float(np.percentile(_border(ink), 95)), _MIN_INK * float(ink.max()))
    rows, columns = np.nonzero(ink > faintest)
    if not len(rows):
        return ink
    return np.where(ink > faintest, ink, np.uint8(0))[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


def _scale(ink: Images, box: int) -> Images:
    """The ink with its longer side at `box` pixels and the brightest pixel as bright as before."""
    height, width = ink.shape
    longer = max(height, width)
    if longer == box:
        return ink
    sides = (max(round(width * box / longer), 1), max(round(height * box / longer), 1))
    small = np.asarray(Image.fromarray(ink).resize(sides, Image.Resampling.BICUBIC)).astype(np.float64)
    gain = float(ink.max()) / max(float(small.max()), 1.0)
    return np.clip(np.rint(small * gain), 0, 255).astype(np.uint8)


def _place(ink: Images, size: int) -> Images:
    """The ink on an empty square, its center of mass in the middle as far as the edges allow."""
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


def fit_image(picture: Images, card: ModelMetadata, invert: bool | None = None) -> Images:
    """A picture [H, W, C] in the size of the network's input.

    Args:
        invert: for digits, whether the ink is darker than the paper; None: found out from the border.
    """
    if card.fit == "digit":
        return fit_digit(picture, card.transform.height, invert)
    return fit_photo(picture, card.transform)


def fit_photo(picture: Images, transform: Transform) -> Images:
    """The middle of a photograph as validation sees it: the centered square of the share that the transform names,
    resized. A picture that has the size of the input already is returned as it is."""
    if picture.shape[:2] == (transform.height, transform.width):
        return picture
    top, left, tall, wide = center_box(picture.shape[:2], transform.crop_share)
    part = picture[top : top + tall, left : left + wide]
    image = Image.fromarray(part[..., 0] if transform.channels == 1 else part)
    small = image.resize((transform.width, transform.height), Image.Resampling.BILINEAR)
    return np.array(small).reshape(transform.height, transform.width, transform.channels)
