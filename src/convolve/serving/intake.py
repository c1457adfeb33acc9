"""From the picture that somebody gives to the pixels that a network was trained on."""

import numpy as np
from PIL import Image

from convolve.data.cropping import centre_box
from convolve.data.dataset import Images
from convolve.data.pictures import fit_digit
from convolve.data.transform import Transform
from convolve.serving.card import Card


def fit_picture(picture: Images, card: Card, invert: bool | None = None) -> Images:
    """A picture [H, W, C] in the size of the network's input.

    Args:
        invert: for digits, whether the ink is darker than the paper; None: found out from the border.
    """
    if card.fit == "digit":
        return fit_digit(picture, card.transform.height, invert)
    return fit_photo(picture, card.transform)


def fit_photo(picture: Images, transform: Transform) -> Images:
    """The middle of a photograph as validation sees it: the centred square of the share that the transform names,
    resized. A picture that has the size of the input already is returned as it is."""
    if picture.shape[:2] == (transform.height, transform.width):
        return picture
    top, left, tall, wide = centre_box(picture.shape[:2], transform.crop_share)
    part = picture[top : top + tall, left : left + wide]
    image = Image.fromarray(part[..., 0] if transform.channels == 1 else part)
    small = image.resize((transform.width, transform.height), Image.Resampling.BILINEAR)
    return np.array(small).reshape(transform.height, transform.width, transform.channels)
