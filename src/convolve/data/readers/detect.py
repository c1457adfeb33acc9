"""Detect the format of the images in a folder, and open its two splits."""

from pathlib import Path
from typing import Any

import numpy as np

from convolve.data.dataset import Dataset, Images, Reader
from convolve.data.image_io import decode_image
from convolve.data.loader.decoding import EncodedImages
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.readers import raw_store, tfrecord, webdataset
from convolve.data.readers.image_folder import (
    find_splits,
    has_class_folders,
    index_folder,
    list_folders,
    split_by_hash,
)
from convolve.directory import read_regular
from convolve.download import Progress
from convolve.errors import DataError

NAME = "pictures"
_SMALL = 64
_MOST_CLASSES = 1_000_000

SUPPORTED_LAYOUTS = (
    "train/ and val/ with a folder for each class, folders of classes, train-*.tar and validation-*.tar, "
    "train-00000-of-01024 and its companions, a TFDS folder, or a store made by `convolve data prepare`"
)


def open_images(root: Path, origin: str, progress: Progress) -> Dataset[EncodedImages] | None:
    """Open the images in a folder as a data set; return None if it contains none. Incomplete data are an error."""
    if not root.is_dir():
        return None
    try:
        for find in (_find_raw, _find_tars, _find_records, _find_folders):
            dataset = find(root, origin, progress)
            if dataset is not None:
                return dataset
    except OSError as error:
        raise DataError(f"{root}: cannot read ({error.strerror or error})") from error
    return None


def _find_raw(root: Path, origin: str, progress: Progress) -> Dataset[EncodedImages] | None:
    metadata = webdataset.read_metadata(root)
    if metadata.get("format") != raw_store.FORMAT:
        return None
    classes = _class_names(metadata, root, 0)
    train, test = (raw_store.open_raw(root, split, len(classes)) for split in ("train", "validation"))
    return Dataset(NAME, train, test, classes, f"{origin} (raw store)")


def _find_tars(root: Path, origin: str, progress: Progress) -> Dataset[EncodedImages] | None:
    shards = webdataset.find_shards(root)
    if shards is None:
        return None
    train = webdataset.index_tars(root, shards[0], "train", progress)
    webdataset.require_length(root, "train", len(train))
    skipped = webdataset.unused_shards(root, [*shards[0], *shards[1]]) + train.skipped
    if shards[1]:
        test = webdataset.index_tars(root, shards[1], "validation", progress)
        webdataset.require_length(root, "validation", len(test))
        skipped += test.skipped
    else:
        train, test = (train.take(rows) for rows in split_by_hash(train))
    classes = _checked_classes(webdataset.read_metadata(root), root, train, test)
    return Dataset(NAME, train, test, classes, f"{origin} (WebDataset)", skipped)


def _find_records(root: Path, origin: str, progress: Progress) -> Dataset[EncodedImages] | None:
    for kind, find in (("ImageNet TFRecord", tfrecord.find_imagenet), ("TFDS", tfrecord.find_tfds)):
        shards = find(root)
        if shards is not None:
            train, test = (
                tfrecord.index_records(root, paths, split, progress)
                for paths, split in zip(shards, ("train", "validation"), strict=True)
            )
            path = root / "label.labels.txt"
            names = _read_names(path) if path.is_file() else []
            classes = _checked_classes({"classes": [name for name in names if name]}, root, train, test)
            return Dataset(NAME, train, test, classes, f"{origin} ({kind})")
    return None


def _find_folders(root: Path, origin: str, progress: Progress) -> Dataset[EncodedImages] | None:
    splits = find_splits(root)
    if splits is not None:
        classes = tuple(folder.name for folder in list_folders(splits[0]))
        train, test = (index_folder(root, split, classes, progress) for split in splits)
        return Dataset(NAME, train, test, classes, f"{origin} (folders)", train.skipped + test.skipped)
    if not has_class_folders(root):
        return None
    classes = tuple(folder.name for folder in list_folders(root))
    whole = index_folder(root, root, classes, progress)
    train, test = (whole.take(rows) for rows in split_by_hash(whole))
    return Dataset(NAME, train, test, classes, f"{origin} (folders without a split)", whole.skipped)


def _read_names(path: Path) -> list[str]:
    try:
        return read_regular(path).decode().split("\n")
    except ValueError as error:
        raise DataError(f"{path}: not a text in UTF-8 ({error}); get an undamaged copy") from None


def _checked_classes(metadata: dict[str, Any], root: Path, train: Reader, test: Reader) -> tuple[str, ...]:
    highest = int(max(train.labels.max(), test.labels.max()))
    lowest = int(min(train.labels.min(), test.labels.min()))
    classes = _class_names(metadata, root, min(highest, _MOST_CLASSES) + 1)
    if lowest < 0 or highest >= len(classes):
        wrong = lowest if lowest < 0 else highest
        raise DataError(f"{root}: label {wrong}: must be 0 to {len(classes) - 1}; get an undamaged copy")
    return classes


def _class_names(metadata: dict[str, Any], root: Path, count: int) -> tuple[str, ...]:
    """Return the names in the metadata, or numbers."""
    names = metadata.get("classes") or [str(number) for number in range(count)]
    if not isinstance(names, list) or not names:
        raise DataError(f"{root}: no class names in its metadata; prepare it again")
    return tuple(map(str, names))


def load_into_memory(dataset: Dataset[EncodedImages], budget: int, progress: Progress) -> Dataset[Reader]:
    """Decode a data set if its images are small, all of one size, and fit the budget in bytes; else return it as is."""
    first = _pixels(dataset.train, 0)
    count = len(dataset.train) + len(dataset.test)
    if max(first.shape) > _SMALL or count * first.size > budget:
        return dataset
    train, test = (_decode_all(reader, first.shape, progress) for reader in (dataset.train, dataset.test))
    if train is None or test is None:
        return dataset
    origin = f"{dataset.origin}, in memory"
    return Dataset(dataset.name, train, test, dataset.classes, origin, dataset.skipped)


def _pixels(reader: EncodedImages, row: int) -> Images:
    data = reader.read(row)
    if not isinstance(data, bytes):
        return data
    return decode_image(data, Path(reader.name(row)), channels=3)


def _decode_all(reader: EncodedImages, shape: tuple[int, ...], progress: Progress) -> InMemoryImages | None:
    """Return all images, or None if one has another size."""
    images = np.empty((len(reader), *shape), np.uint8)
    for row in range(len(reader)):
        pixels = _pixels(reader, row)
        if pixels.shape != shape:
            return None
        images[row] = pixels
        if row % 1000 == 0:
            progress("decode images", row, len(reader))
    return InMemoryImages(images, reader.labels)
