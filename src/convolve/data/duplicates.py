"""Find images that are the same or nearly the same: other size, format, quality, brightness, a small crop, mirrored.

The arithmetic: the gray thumbnail of an image [32, 32] is averaged to [8, 8] and to [16, 16]. The differences between
neighbors, across and down, form a vector of length one. Two images are candidates if the product of their vectors at
8 x 8 is at least 0.6; each image keeps its best few. A candidate is a near duplicate if the product at 16 x 16 is at
least 0.9, or at least 0.25 and then 0.9 after an alignment: one image against a crop of the other to 96, 92 or 88 % of
its sides, at nine positions. Images below 64 pixels look alike more easily: they need 0.97, without alignment.

Exact duplicates have the same bytes.

Every command on a folder needs its duplicates, and comparing all pairs of many images takes long, so what was found is
cached by the contents of the images.
"""

import hashlib
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from convolve.data.scan import THUMBNAIL, Scan, scans_folder
from convolve.download import Progress, ignore_progress
from convolve.files import atomic_file
from convolve.rng import Indices

Vectors = npt.NDArray[np.float32]
MOST_COMPARED = 100_000
_CANDIDATE, _UNALIGNED, _NEAR, _NEAR_SMALL = 0.6, 0.25, 0.9, 0.97
_SMALL_SIDE = 64
_FLAT = 4.0  # gradients of an image without contrast stay short vectors
_BEST = 8
_BLOCK = 1024
_PAIRS = 2048
_CROPS = (0.96, 0.92, 0.88)
_LARGEST_GROUP = 20
_LARGEST_FRACTION = 0.1
_VERSION = 1  # of the comparison; a change makes cached pairs invalid
_FEWEST_CACHED = 1000


@dataclass(frozen=True)
class Duplicate:
    """Two images, the earlier row first, that have the same bytes or look the same."""

    first: int
    second: int
    exact: bool


def find_duplicates(scan: Scan, progress: Progress = ignore_progress) -> list[Duplicate]:
    """Return all pairs of near duplicates, and each exact duplicate with the first image that has its bytes.

    With more than 100,000 images only exact duplicates are found, since comparing all pairs would take too long.
    """
    exact = list(_find_exact(scan))
    copies = {pair.second for pair in exact}
    rows = np.array([row for row in np.flatnonzero(scan.readable).tolist() if row not in copies], np.int64)
    if not 2 <= len(rows) <= MOST_COMPARED:
        return exact
    part = scan.take(rows)
    path = _cache_path(part) if len(part) >= _FEWEST_CACHED else None
    pairs = None if path is None else _load(path, len(part))
    if pairs is None:
        pairs = _compare(part, progress)
        if path is not None:
            _store(pairs, path)
    return [*exact, *(Duplicate(first, second, exact=False) for first, second in rows[pairs].tolist())]


def _compare(scan: Scan, progress: Progress) -> Indices:
    """Return pairs [M, 2] of rows that are near duplicates, in order."""
    near = np.where(scan.sizes.min(1) < _SMALL_SIDE, _NEAR_SMALL, _NEAR)
    pairs = _find_candidates(scan.thumbnails, progress)
    blocks = (pairs[start : start + _PAIRS] for start in range(0, len(pairs), _PAIRS))
    found = sorted({pair for block in blocks for pair in _verify(scan, block, near)})
    return np.array(found, np.int64).reshape(-1, 2)


def _cache_path(scan: Scan) -> Path:
    digest = hashlib.sha256(f"duplicates {_VERSION} {len(scan)}".encode())
    for array in (scan.thumbnails, scan.sizes):
        digest.update(np.ascontiguousarray(array).data)
    return scans_folder() / f"duplicates-{digest.hexdigest()[:24]}.npz"


def _store(pairs: Indices, path: Path) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as draft:
            np.savez(draft, pairs=pairs)


def _load(path: Path, count: int) -> Indices | None:
    """Return the cached pairs, or None if they are absent or damaged. Their name is a hash of all images."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            pairs: Indices = stored["pairs"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    if pairs.dtype != np.int64 or pairs.ndim != 2 or pairs.shape[1] != 2:
        return None
    in_order = (pairs[:, 0] >= 0) & (pairs[:, 0] < pairs[:, 1]) & (pairs[:, 1] < count)
    return pairs if in_order.all() else None


def _find_exact(scan: Scan) -> Iterator[Duplicate]:
    first_rows: dict[bytes, int] = {}
    for row in np.flatnonzero(scan.digests.any(1)).tolist():
        first = first_rows.setdefault(scan.key(row), row)
        if first != row:
            yield Duplicate(first, row, exact=True)


def _gradients(gray: npt.NDArray[np.float32], side: int) -> Vectors:
    """Return the differences between neighbors of images [N, S, S] averaged to `side`, as vectors of length one."""
    block = gray.shape[1] // side
    small = gray.reshape(len(gray), side, block, side, block).mean((2, 4)) if block > 1 else gray
    across, down = small[:, :, 1:] - small[:, :, :-1], small[:, 1:] - small[:, :-1]
    count = side * (side - 1)
    vectors = np.concatenate((across.reshape(-1, count), down.reshape(-1, count)), 1)
    lengths = np.sqrt((vectors**2).sum(1, keepdims=True))
    unit: Vectors = (vectors / np.maximum(lengths, _FLAT)).astype(np.float32)
    return unit


def _find_candidates(thumbnails: npt.NDArray[np.uint8], progress: Progress) -> Indices:
    """Return pairs [M, 3] of rows that may be near duplicates; the third number is 1 if the second is mirrored."""
    gray = thumbnails.astype(np.float32)
    upright, mirrored = _gradients(gray, 8), _gradients(gray[:, :, ::-1], 8)
    found = [np.empty((0, 3), np.int64)]
    for start in range(0, len(gray), _BLOCK):
        progress("compare images", start, len(gray))
        rows = np.arange(start, min(start + _BLOCK, len(gray)))
        for flip, others in enumerate((upright, mirrored)):
            products = upright[rows] @ others[start:].T
            one, other = np.nonzero(products >= _CANDIDATE)
            one, other = one[other > one], other[other > one]  # each pair once
            one, other = _keep_best(one, other, products[one, other])
            found.append(np.stack((start + one, start + other, np.full(len(one), flip)), 1))
    return np.concatenate(found)


def _keep_best(one: Indices, other: Indices, products: npt.NDArray[np.float32]) -> tuple[Indices, Indices]:
    """Keep the few best pairs of each first image."""
    order = np.lexsort((-products, one))
    one, other = one[order], other[order]
    starts = np.searchsorted(one, one)
    best = np.arange(len(one)) - starts < _BEST
    return one[best], other[best]


def _verify(scan: Scan, pairs: Indices, near: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
    """Return the pairs that match in one of the alignments."""
    first = scan.thumbnails[pairs[:, 0]].astype(np.float32)
    second = scan.thumbnails[pairs[:, 1]].astype(np.float32)
    mirrored = pairs[:, 2] == 1
    second[mirrored] = second[mirrored][:, :, ::-1]
    whole = _gradients(first, 16), _gradients(second, 16)
    best = (whole[0] * whole[1]).sum(1)
    needed = np.maximum(near[pairs[:, 0]], near[pairs[:, 1]])
    rows = np.flatnonzero((best >= _UNALIGNED) & (best < needed) & (needed < _NEAR_SMALL))
    for image, other in ((first, whole[1]), (second, whole[0])):
        best[rows] = np.maximum(best[rows], _best_crop(image[rows], other[rows]))
    return [(int(one), int(two)) for one, two, _ in pairs[best >= needed].tolist()]


def _best_crop(images: npt.NDArray[np.float32], others: Vectors) -> npt.NDArray[np.float32]:
    """Return the highest product of each vector with those of the crops of an image."""
    best = np.full(len(images), -1, np.float32)
    for (scale, _), across in _crops().items():
        columns = np.ascontiguousarray(
            (images.reshape(-1, THUMBNAIL) @ across.T).reshape(-1, THUMBNAIL, 16).swapaxes(1, 2)
        )
        for (other_scale, _), down in _crops().items():
            if scale == other_scale:
                cropped = (columns.reshape(-1, THUMBNAIL) @ down.T).reshape(-1, 16, 16).swapaxes(1, 2)
                best = np.maximum(best, (_gradients(cropped, 16) * others).sum(1))
    return best


@cache
def _crops() -> dict[tuple[float, float], npt.NDArray[np.float32]]:
    """Return, by scale and position, the matrix [16, 32] that stretches a part of an axis to 16 values."""
    halves = np.repeat(np.eye(16), 2, axis=1) / 2
    places = [(scale, place) for scale in _CROPS for place in (0.0, 0.5, 1.0)]
    return {
        (scale, place): (halves @ _stretch(scale, (1 - scale) * place)).astype(np.float32) for scale, place in places
    }


def _stretch(scale: float, offset: float) -> npt.NDArray[np.float32]:
    """Return linear interpolation [32, 32] at the centers of 32 equal parts of [offset, offset + scale]."""
    centers = (offset + scale * (np.arange(THUMBNAIL) + 0.5) / THUMBNAIL) * THUMBNAIL - 0.5
    low = np.clip(np.floor(centers).astype(np.int64), 0, THUMBNAIL - 2)
    weight = np.clip(centers - low, 0, 1)
    matrix = np.zeros((THUMBNAIL, THUMBNAIL), np.float32)
    rows = np.arange(THUMBNAIL)
    matrix[rows, low], matrix[rows, low + 1] = 1 - weight, weight
    return matrix


def group_duplicates(count: int, duplicates: Sequence[Duplicate]) -> Indices:
    """Return the group of each image: the lowest row among its duplicates, and theirs.

    A group of near duplicates larger than 20 images and a tenth of all shows that the images of the set look alike by
    nature, so its members count as different; exact duplicates stay together.
    """
    groups = _connect(count, duplicates)
    sizes = np.bincount(groups, minlength=count)
    large = sizes > max(_LARGEST_GROUP, _LARGEST_FRACTION * count)
    if not large.any():
        return groups
    return _connect(count, [pair for pair in duplicates if pair.exact or not large[groups[pair.first]]])


def _connect(count: int, duplicates: Sequence[Duplicate]) -> Indices:
    parents = list(range(count))

    def root(row: int) -> int:
        while parents[row] != row:
            parents[row] = parents[parents[row]]
            row = parents[row]
        return row

    for pair in duplicates:
        one, two = root(pair.first), root(pair.second)
        parents[max(one, two)] = min(one, two)
    return np.array([root(row) for row in range(count)], np.int64)
