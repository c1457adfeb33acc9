"""The ways in which a folder can hold a known data set: IDX files, one npz file, TFDS records, or CIFAR's records."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from convolve.data.catalog import DatasetInfo, IdxFile
from convolve.data.dataset import Split, make_split
from convolve.data.fingerprint import recognize_labels
from convolve.data.readers.cifar import read_binary, read_python
from convolve.data.readers.mnist import read_images, read_labels, read_npz
from convolve.data.readers.tfrecord import read_examples
from convolve.download import Progress
from convolve.errors import DataError

Splits = tuple[Split, Split]
_TFDS_VERSION = "3.0.1"
_ZIP_MAGIC = b"PK"
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")


def read_place(place: Path, entry: DatasetInfo, progress: Progress) -> Splits | None:
    """The training and test split of `entry` in a folder or in a subfolder named after it; None when it is not there.

    What is there but damaged, incomplete or another known data set is an error.
    """
    if place.is_file() and entry.layout == "idx":
        return _checked(_read_npz_file(place, entry), entry, place)
    for folder in (*(place / name for name in entry.folders), place):
        if folder.is_dir():
            for read in _READERS[entry.layout]:
                splits = read(folder, entry, progress)
                if splits is not None:
                    return _checked(splits, entry, folder)
    return None


def describe_layouts(entry: DatasetInfo) -> str:
    """What `read_place` looks for, for an error message."""
    subfolders = ", ".join(f"{name}/" for name in entry.folders)
    if entry.layout == "cifar":
        names = ", ".join(file.name for file in entry.files)
        return f"{names} (or the same without .bin, from the python version), there or in {subfolders}"
    return (
        f"{entry.files[0].name}[.gz] and its three companions, {_npz_names(entry)[0]}, or "
        f"{_TFDS_VERSION}/{_tfds_name(entry)}-train.tfrecord-*, there or in {subfolders}"
    )


def _checked(splits: Splits, entry: DatasetInfo, place: Path) -> Splits:
    train, test = splits
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"{place}: training images of {train.images.shape[1:]} but test images of {test.images.shape[1:]}"
        )
    known = recognize_labels(test)
    if known is not None and known.name != entry.name:
        raise DataError(
            f"{place}: holds {known.name}, not {entry.name}; set --dataset {known.name} or another --data-dir"
        )
    return splits


def _join(
    parts: tuple[Path, Path],
    images: np.typing.NDArray[np.uint8],
    labels: np.typing.NDArray[np.int64],
    entry: DatasetInfo,
) -> Split:
    return make_split(images, labels, classes=len(entry.classes), where=" and ".join(map(str, parts)))


def _read_idx_folder(folder: Path, entry: DatasetInfo, progress: Progress) -> Splits | None:
    found = [_find_idx(folder, file) for file in entry.files]
    missing = [file.name for file, path in zip(entry.files, found, strict=True) if path is None]
    if len(missing) == len(found):
        return None
    if missing:
        raise DataError(f"{folder}: {', '.join(missing)} missing; put all four files of {entry.name} there")
    paths = [path for path in found if path is not None]
    train, test = (
        _join(
            (images, labels),
            read_images(images, limit=entry.limit),
            read_labels(labels, limit=entry.limit),
            entry,
        )
        for images, labels in (paths[:2], paths[2:])
    )
    return train, test


def _read_binary_folder(folder: Path, entry: DatasetInfo, progress: Progress) -> Splits | None:
    return read_binary(folder, entry)


def _read_python_folder(folder: Path, entry: DatasetInfo, progress: Progress) -> Splits | None:
    return read_python(folder, entry)


def _find_idx(folder: Path, file: IdxFile) -> Path | None:
    names = (file.name, file.name.replace("-idx", ".idx"))
    paths = [folder / f"{name}{ending}" for name in names for ending in ("", ".gz")]
    return next((path for path in paths if path.is_file()), None)


def _npz_names(entry: DatasetInfo) -> tuple[str, ...]:
    return (f"{entry.name}.npz", f"{_tfds_name(entry)}.npz")


def _read_npz_folder(folder: Path, entry: DatasetInfo, progress: Progress) -> Splits | None:
    path = next((folder / name for name in _npz_names(entry) if (folder / name).is_file()), None)
    return None if path is None else _read_npz_file(path, entry)


def _read_npz_file(path: Path, entry: DatasetInfo) -> Splits:
    with path.open("rb") as file:
        if file.read(2) != _ZIP_MAGIC:
            raise DataError(f"{path}: neither a folder nor an npz file; it must be one to hold {entry.name}")
    x_train, y_train, x_test, y_test = read_npz(path, limit=entry.limit)
    return _join((path, path), x_train, y_train, entry), _join((path, path), x_test, y_test, entry)


def _tfds_name(entry: DatasetInfo) -> str:
    return entry.name.replace("-", "_")


def _read_tfds_folder(folder: Path, entry: DatasetInfo, progress: Progress) -> Splits | None:
    for place in (folder, folder / _TFDS_VERSION):
        shards = [_find_shards(place, f"{_tfds_name(entry)}-{split}.tfrecord") for split in ("train", "test")]
        if all(shards):
            train, test = (_read_shards(paths, entry, progress) for paths in shards)
            return train, test
        if any(shards):
            raise DataError(f"{place}: only one of train and test is there; put both splits of {entry.name} there")
    return None


def _find_shards(folder: Path, stem: str) -> list[Path]:
    """All shards of one split in order; a gap in the numbering is an error."""
    paths = sorted(folder.glob(f"{stem}-*-of-*"))
    places = [(int(match[1]), int(match[2])) for match in map(_SHARD.search, map(str, paths)) if match]
    total = places[0][1] if places else 0
    if places != [(number, total) for number in range(total)] or len(places) != len(paths):
        raise DataError(f"{folder}: {len(paths)} files {stem}-*, {total} belong together; put all of them there")
    return paths


def _read_shards(paths: list[Path], entry: DatasetInfo, progress: Progress) -> Split:
    parts = [read_examples(path, progress, limit=entry.limit) for path in paths]
    if len({images.shape[1:] for images, _ in parts}) > 1:
        raise DataError(f"{paths[0].parent}: shards with images of different sizes; get an undamaged copy")
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return _join((paths[0], paths[-1]), images, labels, entry)


_READERS: dict[str, tuple[Callable[[Path, DatasetInfo, Progress], Splits | None], ...]] = {
    "idx": (_read_idx_folder, _read_npz_folder, _read_tfds_folder),
    "cifar": (_read_binary_folder, _read_python_folder),
}
