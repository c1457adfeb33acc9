"""Hold out a part of each class, or divide a set into folds.

The arithmetic: images that are duplicates form a group, which is never divided. A group belongs to the class of its
first image and has a number u in [0, 1), a hash of the split and of the smallest content hash of its images. Held out
are the groups
with u < fraction. Only the image decides, so an added image moves no other one, unless they are duplicates. Two
corrections, by ascending u: a class gives at least a third and at most twice its part (at least one of two groups)
and keeps a group for training.

Folds: group number i of a class in ascending u is in fold i mod K. An image with several labels counts as one of its
rarest label.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from convolve.data.dataset import Labels
from convolve.data.duplicates import MOST_COMPARED, find_duplicates, group_duplicates
from convolve.data.loader.decoding import EncodedImages
from convolve.data.sampling import find_strata
from convolve.data.scan import scan_images
from convolve.download import Progress
from convolve.rng import Indices, hash_key

_LEAST, _MOST = 1 / 3, 2
_TENTH = 0.1


@dataclass(frozen=True)
class SplitOptions:
    """How a folder is split where it is not split itself.

    Args:
        fraction: part of each class of a folder without splits that is the test split.
        validation_fraction: part of each class of the training images that selects; 0 for none, but a tenth of `train/`
            if there is only a test split.
        rule: `content` as described above; `name` is the rule of version 0.1: a tenth by the hash of the file name, and
            a test folder also serves for validation.
        fold: number of the fold to hold out, and the number of folds, in place of the fraction.
        select: False if no part of `train/` is needed to select.
        train: open the training split; False if only the test split is scored.
        task: what an image has; `auto` follows the data.
    """

    fraction: float = 0.1
    validation_fraction: float = 0.0
    rule: Literal["content", "name"] = "content"
    fold: tuple[int, int] | None = None
    select: bool = True
    train: bool = True
    task: str = "auto"

    def take_test(self, reader: EncodedImages, progress: Progress) -> tuple[Indices, Indices]:
        """Return the rows for training and for testing, both ascending."""
        if self.fold is not None:
            return take_fold(reader, *self.fold, progress)
        return hold_out(reader, self.fraction, "test", progress)

    def take_validation(self, reader: EncodedImages, progress: Progress) -> tuple[Indices, Indices]:
        """Return the rows for training and for selection, both ascending."""
        return hold_out(reader, self.validation_fraction or _TENTH, "validation", progress)


DEFAULT_SPLIT = SplitOptions()


def hold_out(reader: EncodedImages, fraction: float, split: str, progress: Progress) -> tuple[Indices, Indices]:
    """Return the rows that stay and those that are held out for a split, both ascending."""
    held = held_out(find_strata(reader.labels), *_groups(reader, progress), fraction, split)
    return np.flatnonzero(~held), np.flatnonzero(held)


def take_fold(reader: EncodedImages, fold: int, folds: int, progress: Progress) -> tuple[Indices, Indices]:
    """Return the rows outside and inside of one fold, both ascending."""
    numbers = assign_folds(find_strata(reader.labels), *_groups(reader, progress), folds)
    return np.flatnonzero(numbers != fold), np.flatnonzero(numbers == fold)


def _groups(reader: EncodedImages, progress: Progress) -> tuple[list[bytes], Indices]:
    """Return the key and the group of each image. Above 100,000 images names are the keys, and nothing is compared."""
    if len(reader) > MOST_COMPARED:
        names = [reader.name(row).encode("utf-8", "surrogateescape") for row in range(len(reader))]
        return names, np.arange(len(reader))
    scan = scan_images(reader, progress)
    return [scan.key(row) for row in range(len(scan))], group_duplicates(len(scan), find_duplicates(scan, progress))


def held_out(
    labels: Labels, keys: Sequence[bytes], groups: Indices, fraction: float, split: str = "test"
) -> npt.NDArray[np.bool_]:
    """Return True for each image that is held out for a split."""
    sizes = np.bincount(groups, minlength=len(groups))
    chosen = np.zeros(len(groups), np.bool_)
    for ordered, numbers in _by_class(labels, keys, groups, split):
        part = fraction * int(sizes[ordered].sum())
        least = max(1, math.floor(_LEAST * part)) if len(ordered) > 1 else 0
        counts = np.cumsum(sizes[ordered])
        count = int((numbers < fraction).sum())
        enough = int(np.searchsorted(counts, least)) + 1 if least else 0
        most = int(np.searchsorted(counts, math.ceil(_MOST * part), side="right"))
        taken = min(max(min(count, most), enough), len(ordered) - 1)
        chosen[ordered[:taken]] = True
    return chosen[groups]


def assign_folds(labels: Labels, keys: Sequence[bytes], groups: Indices, folds: int) -> Indices:
    """Return the fold of each image."""
    numbers = np.zeros(len(groups), np.int64)
    for start, (ordered, _) in enumerate(_by_class(labels, keys, groups, "fold")):
        numbers[ordered] = (start + np.arange(len(ordered))) % folds
    return numbers[groups]


def _by_class(
    labels: Labels, keys: Sequence[bytes], groups: Indices, split: str
) -> list[tuple[Indices, npt.NDArray[np.float64]]]:
    """Return for each class its groups in ascending u, and these numbers."""
    smallest: dict[int, bytes] = {}
    for key, group in zip(keys, groups.tolist(), strict=True):
        smallest[group] = min(key, smallest.get(group, key))
    rows = np.array(list(smallest), np.int64)
    numbers = np.array([hash_key(split, key.hex()) for key in smallest.values()], np.float64) / 2.0**64
    found = []
    for label in np.unique(labels[rows]):
        inside = np.flatnonzero(labels[rows] == label)
        inside = inside[np.argsort(numbers[inside], kind="stable")]
        found.append((rows[inside], numbers[inside]))
    return found
