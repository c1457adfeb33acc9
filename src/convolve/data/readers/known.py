"""Read a known data set from a folder: IDX files, one npz file, TFDS records, or CIFAR's records."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from convolve.data.catalog import DatasetInfo, IdxFile
from convolve.data.fingerprint import recognize_labels
from convolve.data.loader.in_memory import InMemoryImages, check_images
from convolve.data.readers.cifar import Splits, read_binary, read_python
from convolve.data.readers.mnist import read_images, read_labels, read_npz
from convolve.data.readers.tfrecord import read_examples
from convolve.directory import open_regular
from convolve.download import Progress
from convolve.errors import DataError

_TFDS_VERSION = "3.0.1"
_ZIP_MAGIC = b"PK"
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")


def read_known(path: Path, entry: DatasetInfo, progress: Progress) -> Splits | None:
    """Read the training and test split of `entry` from a folder or a subfolder named after it; None if it has none.

    Damaged or incomplete files, or those of another known data set, are an error.
    """
    if path.is_file() and entry.layout == "idx":
        return _checked(_read_npz_file(path, entry), entry, path)
    for folder in (*(path / name for name in entry.folders), path):
        if folder.is_dir():
            for read in _READERS[entry.layout]:
                splits = read(folder, entry, progress)
                if splits is not None:
                    return _checked(splits, entry, folder)
    return None


def describe_layouts(entry: DatasetInfo) -> str:
    """Return what `read_known` looks for, for an error message."""
    subfolders = ", ".join(f"{name}/" for name in entry.folders)
    if entry.layout == "cifar":
        names = ", ".join(file.name for file in entry.files)
        return f"{names} (or the same without .bin, from the python version), in it or in {subfolders}"
    return (
        f"{entry.files[0].name}[.gz] and its three companions, {_npz_names(entry)[0]}, or "
        f"{_TFDS_VERSION}/{_tfds_name(entry)}-train.tfrecord-*, in it or in {subfolders}"
    )


def _checked(splits: Splits, entry: DatasetInfo, path: Path) -> Splits:
    train, test = splits
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"{path}: training images of {train.images.shape[1:]} but test images of {test.images.shape[1:]}"
        )
    known = recognize_labels(test)
    if known is not None and known.name != entry.name:
        raise DataError(
            f"{path}: contains {known.name}, not {entry.name}; set --dataset {known.name} or another --data-dir"
        )
    return splits


def _join(
    parts: tuple[Path, Path],
    images: np.typing.NDArray[np.uint8],
    labels: np.typing.NDArray[np.int64],
    entry: DatasetInfo,
) -> InMemoryImages:
    return check_images(images, labels, classes=len(entry.classes), source=" and ".join(map(str, parts)))


def _read_idx_folder(folder: Path, entry: DatasetInfo, progress: Progress) -> Splits | None:
    found = [_find_idx(folder, file) for file in entry.files]
    missing = [file.name for file, path in zip(entry.files, found, strict=True) if path is None]
    if len(missing) == len(found):
        return None
    if missing:
        raise DataError(f"{folder}: {', '.join(missing)} missing; add all four files of {entry.name}")
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
    with open_regular(path) as file:
        if file.read(2) != _ZIP_MAGIC:
            raise DataError(f"{path}: neither a folder nor an npz file; give one that contains {entry.name}")
    x_train, y_train, x_test, y_test = read_npz(path, limit=entry.limit)
    return _join((path, path), x_train, y_train, entry), _join((path, path), x_test, y_test, entry)


def _tfds_name(entry: DatasetInfo) -> str:
    return entry.name.replace("-", "_")


def _read_tfds_folder(folder: Path, entry: DatasetInfo, progress: Progress) -> Splits | None:
    for root in (folder, folder / _TFDS_VERSION):
        shards = [_find_shards(root, f"{_tfds_name(entry)}-{split}.tfrecord") for split in ("train", "test")]
        if all(shards):
            train, test = (_read_shards(paths, entry, progress) for paths in shards)
            return train, test
        if any(shards):
            raise DataError(f"{root}: contains only one of train and test; add both splits of {entry.name}")
    return None


def _find_shards(folder: Path, stem: str) -> list[Path]:
    """Return all shards of one split in order; a gap in the numbering is an error."""
    paths = sorted(folder.glob(f"{stem}-*-of-*"))
    numbers = [(int(match[1]), int(match[2])) for match in map(_SHARD.search, map(str, paths)) if match]
    total = numbers[0][1] if numbers else 0
    if numbers != [(number, total) for number in range(total)] or len(numbers) != len(paths):
        raise DataError(f"{folder}: {len(paths)} files {stem}-*, {total} belong together; add the missing ones")
    return paths


def _read_shards(paths: list[Path], entry: DatasetInfo, progress: Progress) -> InMemoryImages:
    parts = [read_examples(path, progress, limit=entry.limit) for path in paths]
    if len({images.shape[1:] for images, _ in parts}) > 1:
        raise DataError(f"{paths[0].parent}: shards with images of different sizes; get an undamaged copy")
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return _join((paths[0], paths[-1]), images, labels, entry)


_READERS: dict[str, tuple[Callable[[Path, DatasetInfo, Progress], Splits | None], ...]] = {
    "idx": (_read_idx_folder, _read_npz_folder, _read_tfds_folder),
    "cifar": (_read_binary_folder, _read_python_folder),
}
