"""The digits that ship inside the package, brought to the form of MNIST.

The stored images are 8x8 with values 0 to 16. They are enlarged to 20x20 by linear interpolation between pixel centres,
in whole numbers, so that every machine gets the same bytes, and get a margin of 4 pixels. The last 297 are for testing.
The collection came from 43 people; these images are from 13 of them, and the cut by position keeps no writer apart.
"""

from pathlib import Path

import numpy as np

from convolve.data.catalogue import DIGITS
from convolve.data.dataset import Dataset, Images, make_split
from convolve.data.idx import read_images, read_labels

ORIGIN = "shipped with convolve"

_FOLDER = Path(__file__).parent / "digits"
_SMALL, _LARGE, _MARGIN, _BRIGHTEST = 8, 20, 4, 16


def load_digits() -> Dataset:
    """The shipped digits as 28x28 grey images, light on dark."""
    images = enlarge(read_images(_FOLDER / "images-idx3-ubyte.gz", limit=1 << 20))
    labels = read_labels(_FOLDER / "labels-idx1-ubyte.gz", limit=1 << 20)
    cut = DIGITS.train_count
    train, test = (
        make_split(images[part], labels[part], classes=len(DIGITS.classes), where=str(_FOLDER))
        for part in (slice(None, cut), slice(cut, None))
    )
    return Dataset(DIGITS.name, train, test, DIGITS.classes, ORIGIN)


def enlarge(small: Images) -> Images:
    """Images [N, 8, 8] of 0 to 16 as [N, 28, 28] of 0 to 255."""
    weights = _interpolation()
    sums = weights @ small.astype(np.int64) @ weights.T
    full = _BRIGHTEST * 100
    large = ((sums * 255 + full // 2) // full).astype(np.uint8)
    return np.pad(large, ((0, 0), (_MARGIN, _MARGIN), (_MARGIN, _MARGIN)))


def _interpolation() -> np.typing.NDArray[np.int64]:
    """Weights [20, 8] in tenths: the centre of large pixel i lies at (4 i - 3) / 10 of the small grid."""
    weights = np.zeros((_LARGE, _SMALL), np.int64)
    for row in range(_LARGE):
        left, tenths = divmod(4 * row - 3, 10)
        weights[row, max(left, 0)] += 10 - tenths
        weights[row, min(left + 1, _SMALL - 1)] += tenths
    return weights
