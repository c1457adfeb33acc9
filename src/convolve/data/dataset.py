"""The parts of a data set: a reader for each of its two splits, the class names, and the targets of a batch.

A reader makes the fetcher for its images: `loader/in_memory.py` if they are in memory, `loader/decoding.py` if they are
files, members of shards or memory-mapped.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from convolve.rng import Indices

if TYPE_CHECKING:
    from convolve.data.loader.decoding import DecodingOptions
    from convolve.data.loader.loader import Fetcher
    from convolve.data.transforms.augment import Augment
    from convolve.data.transforms.normalize import Transform

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
Skipped = tuple[str, int, str]  # reason, number of entries, first example
Task = Literal["single-label", "multi-label", "soft-label"]
"""What an image has: one class, any number of labels, or a probability of each class."""


class Reader(Protocol):
    """Random access to the labels of one split, and to its images through a fetcher."""

    @property
    def labels(self) -> Labels:
        """Class numbers [N], or with several labels per image a matrix [N, labels] of 0 and 1."""

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels of images in memory; None if images are cropped and resized when fetched."""

    def __len__(self) -> int: ...

    def take(self, rows: Indices) -> "Reader":
        """Return a reader of some of the samples, in this order."""

    def fit_transform(self, normalization: str, size: int | None, photo_size: int | None) -> "Transform":
        """Return the transform of a normalization. `size` is the input side; by default images in memory keep their
        size, and photographs get `photo_size`."""

    def fetcher(
        self, transform: "Transform", augment: "Augment", device: torch.device, options: "DecodingOptions"
    ) -> "Fetcher":
        """Return a fetcher of pixels in the size of `transform`; images in memory are copied to `device`."""


ReaderT = TypeVar("ReaderT", bound=Reader, covariant=True)


@dataclass(frozen=True)
class Dataset(Generic[ReaderT]):
    """A training and a test split, the class names in label order, and where the data were found.

    Args:
        skipped: entries of a folder or archive that are in no split.
        validation: split that selects checkpoints, if it is not the test split; the test split is then read only once,
            at the end.
        test_name: what the test split is called in the output: `validation` if the data has no other.
        task: what an image has; `classes` are the labels if it has several.
    """

    name: str
    train: ReaderT
    test: ReaderT
    classes: tuple[str, ...]
    origin: str
    skipped: tuple[Skipped, ...] = ()
    validation: ReaderT | None = None
    test_name: str = "test"
    task: Task = "single-label"

    @property
    def splits(self) -> dict[str, ReaderT]:
        """Return the splits by name: train, validation if there is one, and the test split."""
        between = {} if self.validation is None else {"validation": self.validation}
        return {"train": self.train, **between, self.test_name: self.test}


@dataclass(frozen=True)
class Targets:
    """Labels [N], or labels [K, N] with weights [K, N] that sum to one for each sample.

    A dense target [N, classes] has a number in [0, 1] for each class: its probability, or 1 for each label of an image.
    """

    labels: Tensor
    weights: Tensor | None = None

    def __len__(self) -> int:
        dense = self.weights is None and self.labels.ndim == 2
        return self.labels.shape[0 if dense else -1]
