"""A data set in memory: two splits of uint8 images with their labels, and what the labels mean.

What a micro batch should be told: one label for each sample, or several with weights where images were mixed.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from convolve.errors import DataError

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
MAX_SIDE = 4096


class Samples(Protocol):
    """One split, wherever its images are."""

    @property
    def labels(self) -> Labels:
        """The class of each sample."""
        ...

    def __len__(self) -> int: ...

    def take(self, rows: npt.NDArray[np.int64]) -> "Samples":
        """Some of the samples, in this order."""
        ...


@dataclass(frozen=True)
class Split:
    """One split, whole in memory: images [N, H, W, C] with C = 1 or 3, labels [N]."""

    images: Images
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: npt.NDArray[np.int64]) -> "Split":
        """Some of the samples, in this order; a run of them is not copied."""
        if len(rows) and (np.diff(rows) == 1).all():
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            return Split(self.images[part], self.labels[part])
        return Split(self.images[rows], self.labels[rows])


@dataclass(frozen=True)
class Dataset:
    """A training and a test split, the class names in label order, and where all of it came from."""

    name: str
    train: Samples
    test: Samples
    classes: tuple[str, ...]
    origin: str


def make_split(images: Images, labels: Labels, *, classes: int | None, where: str) -> Split:
    """Join images and labels after checking that they belong together; `classes=None` accepts any label from 0 up.

    Args:
        where: the files, as an error message should name them.
    """
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.ndim != 4 or images.shape[3] not in (1, 3):
        raise DataError(
            f"{where}: image array of shape {images.shape}: must be [count, height, width] or [..., 1 or 3]"
        )
    if not all(1 <= side <= MAX_SIDE for side in images.shape[1:3]):
        raise DataError(f"{where}: images of {images.shape[1]} x {images.shape[2]}: sides must be 1 to {MAX_SIDE}")
    if labels.shape != images.shape[:1]:
        raise DataError(
            f"{where}: {len(images)} images but labels of shape {labels.shape}: the files do not belong together"
        )
    if not len(labels):
        raise DataError(f"{where}: no image in it; get a complete copy")
    _check_labels(labels, classes, where)
    return Split(np.ascontiguousarray(images), labels)


def _check_labels(labels: Labels, classes: int | None, where: str) -> None:
    wrong = labels < 0 if classes is None else (labels < 0) | (labels >= classes)
    if wrong.any():
        first = int(np.argmax(wrong))
        rule = "0 or more" if classes is None else f"0 to {classes - 1}"
        raise DataError(f"{where}: label {int(labels[first])} of sample {first}: must be {rule}; get an undamaged copy")


@dataclass(frozen=True)
class Targets:
    """Labels [N] that count fully, or labels [K, N] with weights [K, N] that add up to one for each sample."""

    labels: Tensor
    weights: Tensor | None = None

    def __len__(self) -> int:
        return self.labels.shape[-1]
