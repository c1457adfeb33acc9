"""From the picture that somebody gives to the pixels that a network was trained on."""

import numpy as np
from PIL import Image

from convolve.data.dataset import Images
from convolve.data.pictures import fit_digit
from convolve.serving.card import Card


def fit_picture(picture: Images, card: Card, invert: bool | None = None) -> Images:
    """A picture [H, W, C] in the size of the network's input.

    Args:
        invert: for digits, whether the ink is darker than the paper; None: found out from the border.
    """
    if card.fit == "digit":
        return fit_digit(picture, card.transform.height, invert)
    return fit_photo(picture, card.transform.height, card.transform.width)


def fit_photo(picture: Images, height: int, width: int) -> Images:
    """The middle of a photograph: scaled until it just covers the input, and cut. One of that size stays as it is."""
    tall, wide, channels = picture.shape
    if (tall, wide) == (height, width):
        return picture
    scale = max(height / tall, width / wide)
    box_wide, box_tall = width / scale, height / scale
    left, top = (wide - box_wide) / 2, (tall - box_tall) / 2
    image = Image.fromarray(picture[..., 0] if channels == 1 else picture)
    small = image.resize(
        (width, height), Image.Resampling.BILINEAR, box=(left, top, left + box_wide, top + box_tall), reducing_gap=None
    )
    return np.array(small).reshape(height, width, channels)
