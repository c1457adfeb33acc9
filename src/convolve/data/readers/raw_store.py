"""The raw store: pictures of one size as plain bytes in npy files, memory-mapped. Nothing is decoded in training.

A folder with `metadata.json`, `train-images.npy` [N, S, S, 3], `train-labels.npy` [N], and the same for `validation`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from convolve.data.dataset import Images, Labels
from convolve.errors import DataError
from convolve.kernels.jpeg import Jpeg
from convolve.rng import Indices

FORMAT = "convolve raw store"
_NO_OBJECTS = np.empty((0, 4), np.float32)


@dataclass(frozen=True)
class RawReader:
    """Memory-mapped pictures; `rows` are the ones that are offered."""

    path: Path
    images: Images
    labels: Labels
    rows: Indices

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, row: int) -> str:
        """The file and the number of a picture in it."""
        return f"{self.path}: image {self.rows[row]}"

    def read(self, row: int) -> Images:
        """The pixels of one picture."""
        pixels: Images = self.images[int(self.rows[row])]
        return pixels

    def read_jpegs(self, rows: Sequence[int], memory: Images) -> dict[int, Jpeg]:
        """A raw store has no JPEG."""
        return {}

    def objects(self, row: int) -> npt.NDArray[np.float32]:
        """A raw store keeps no boxes."""
        return _NO_OBJECTS

    def take(self, rows: Indices) -> "RawReader":
        """Some of the pictures."""
        return RawReader(self.path, self.images, self.labels[rows], self.rows[rows])


def open_raw(root: Path, split: str, classes: int) -> RawReader:
    """One split of a raw store."""
    path = root / f"{split}-images.npy"
    images, labels = (_map(root / f"{split}-{part}.npy") for part in ("images", "labels"))
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or labels.shape != images.shape[:1]:
        raise DataError(
            f"{path}: {images.dtype} {images.shape} with labels {labels.shape}: not a raw store; make it anew"
        )
    if labels.dtype != np.int64 or not len(labels) or labels.min() < 0 or labels.max() >= classes:
        raise DataError(f"{path}: labels must be 0 to {classes - 1}; make the store anew")
    return RawReader(path, images, np.array(labels), np.arange(len(labels)))


def _map(path: Path) -> npt.NDArray[Any]:
    """A memory-mapped array; copy-on-write, so that nobody can change the file through it."""
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it is an archive, not one array")
        return array
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read ({error}); make the store anew") from error
