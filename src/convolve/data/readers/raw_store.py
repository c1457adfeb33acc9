"""The raw store: images of one size as plain bytes in npy files, memory-mapped, so training decodes nothing.

A folder with `metadata.json`, `train-images.npy` [N, S, S, 3], `train-labels.npy` [N], and the same for `validation`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from convolve.data.dataset import Images, Labels
from convolve.data.loader.decoding import EncodedImages
from convolve.directory import open_regular
from convolve.errors import DataError
from convolve.rng import Indices

FORMAT = "convolve raw store"


@dataclass(frozen=True)
class RawReader(EncodedImages):
    """A reader of memory-mapped images: number `rows[i]` in the file is sample i."""

    path: Path
    images: Images
    labels: Labels
    rows: Indices

    def name(self, row: int) -> str:
        return f"{self.path}: image {self.rows[row]}"

    def read(self, row: int) -> Images:
        pixels: Images = self.images[int(self.rows[row])]
        return pixels

    def take(self, rows: Indices) -> "RawReader":
        return RawReader(self.path, self.images, self.labels[rows], self.rows[rows])


def open_raw(root: Path, split: str, classes: int) -> RawReader:
    """Open one split of a raw store."""
    path = root / f"{split}-images.npy"
    images, labels = (_map(root / f"{split}-{part}.npy") for part in ("images", "labels"))
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or labels.shape != images.shape[:1]:
        raise DataError(
            f"{path}: {images.dtype} {images.shape} with labels {labels.shape}: not a raw store; prepare it again"
        )
    if labels.dtype != np.int64 or not len(labels) or labels.min() < 0 or labels.max() >= classes:
        raise DataError(f"{path}: labels must be 0 to {classes - 1}; prepare the store again")
    return RawReader(path, images, np.array(labels), np.arange(len(labels)))


def _map(path: Path) -> npt.NDArray[Any]:
    """Memory-map an array, copy-on-write: the file cannot be changed through it."""
    try:
        open_regular(path).close()
        array: npt.NDArray[Any] = np.load(path, mmap_mode="c", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it is an archive, not one array")
        return array
    except Exception as error:  # numpy parses headers as Python text, which can fail in any way
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path}: cannot read ({reason}); prepare the store again") from error
