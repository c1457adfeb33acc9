"""Which kind of picture data a folder holds, found out from what is in it, and its two splits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convolve.data.dataset import Dataset, Images, Samples, Split
from convolve.data.image_io import decode_image
from convolve.data.loader.decoding import EncodedImages
from convolve.data.readers import raw_store, tfrecord, webdataset
from convolve.data.readers.image_folder import (
    find_splits,
    holds_class_folders,
    index_folder,
    list_folders,
    split_by_hash,
)
from convolve.data.readers.index import Index
from convolve.download import Progress
from convolve.errors import DataError

NAME = "pictures"
_SMALL = 64

SUPPORTED_LAYOUTS = (
    "train/ and val/ with a folder for each class, folders of classes, train-*.tar and validation-*.tar, "
    "train-00000-of-01024 and its companions, a TFDS folder, or a store made by `convolve data prepare`"
)


@dataclass(frozen=True)
class DetectedData:
    """The picture data in a folder: its kind, its splits, and the names of its classes."""

    kind: str
    train: Samples
    test: Samples
    classes: tuple[str, ...]


def open_images(root: Path, origin: str, progress: Progress) -> Dataset | None:
    """The picture data in a folder as a data set; None where there is none."""
    found = detect_images(root, progress)
    if found is None:
        return None
    return Dataset(NAME, found.train, found.test, found.classes, f"{origin} ({found.kind})")


def detect_images(root: Path, progress: Progress) -> DetectedData | None:
    """The picture data in a folder; None where there is none, an error where it is incomplete or damaged."""
    if not root.is_dir():
        return None
    try:
        for find in (_find_raw, _find_tars, _find_records, _find_folders):
            found = find(root, progress)
            if found is not None:
                return found
    except OSError as error:
        raise DataError(f"{root}: cannot be read ({error.strerror or error})") from error
    return None


def _find_raw(root: Path, progress: Progress) -> DetectedData | None:
    facts = webdataset.read_metadata(root)
    if facts.get("format") != raw_store.FORMAT:
        return None
    classes = _class_names(facts, root, 0)
    train, test = (EncodedImages(raw_store.open_raw(root, split, len(classes))) for split in ("train", "validation"))
    return DetectedData("raw store", train, test, classes)


def _find_tars(root: Path, progress: Progress) -> DetectedData | None:
    shards = webdataset.find_shards(root)
    if shards is None:
        return None
    train = webdataset.index_tars(root, shards[0], "train", progress)
    webdataset.require_length(root, "train", len(train))
    if shards[1]:
        test = webdataset.index_tars(root, shards[1], "validation", progress)
        webdataset.require_length(root, "validation", len(test))
    else:
        train, test = (train.take(rows) for rows in split_by_hash(train))
    return _found("WebDataset", train, test, webdataset.read_metadata(root), root)


def _find_records(root: Path, progress: Progress) -> DetectedData | None:
    for kind, find in (("ImageNet TFRecord", tfrecord.find_imagenet), ("TFDS", tfrecord.find_tfds)):
        shards = find(root)
        if shards is not None:
            train, test = (
                tfrecord.index_records(root, paths, what, progress)
                for paths, what in zip(shards, ("train", "validation"), strict=True)
            )
            names = root / "label.labels.txt"
            facts = {"classes": names.read_text(encoding="utf-8").split("\n")} if names.is_file() else {}
            facts = {"classes": [name for name in facts.get("classes", []) if name]}
            return _found(kind, train, test, facts, root)
    return None


def _find_folders(root: Path, progress: Progress) -> DetectedData | None:
    splits = find_splits(root)
    if splits is not None:
        classes = tuple(folder.name for folder in list_folders(splits[0]))
        train, test = (index_folder(root, split, classes, progress) for split in splits)
        return DetectedData("folders", EncodedImages(train), EncodedImages(test), classes)
    if not holds_class_folders(root):
        return None
    classes = tuple(folder.name for folder in list_folders(root))
    whole = index_folder(root, root, classes, progress)
    train, test = (whole.take(rows) for rows in split_by_hash(whole))
    return DetectedData("folders without a split", EncodedImages(train), EncodedImages(test), classes)


def _found(kind: str, train: Index, test: Index, facts: dict[str, Any], root: Path) -> DetectedData:
    highest = int(max(train.labels.max(), test.labels.max()))
    lowest = int(min(train.labels.min(), test.labels.min()))
    classes = _class_names(facts, root, highest + 1)
    if lowest < 0 or highest >= len(classes):
        wrong = lowest if lowest < 0 else highest
        raise DataError(f"{root}: label {wrong}: must be 0 to {len(classes) - 1}; get an undamaged copy")
    return DetectedData(kind, EncodedImages(train), EncodedImages(test), classes)


def _class_names(facts: dict[str, Any], root: Path, count: int) -> tuple[str, ...]:
    """The names in the metadata, or plain numbers."""
    names = facts.get("classes") or [str(number) for number in range(count)]
    if not isinstance(names, list) or not names:
        raise DataError(f"{root}: its metadata names no classes; make it anew")
    return tuple(map(str, names))


def count_classes(samples: Samples, classes: tuple[str, ...]) -> dict[str, int]:
    """The number of samples of each class."""
    counts = np.bincount(samples.labels, minlength=len(classes)).tolist()
    return dict(zip(classes, counts, strict=True))


def load_into_memory(dataset: Dataset, budget: int, progress: Progress) -> Dataset:
    """The same data set decoded, if its pictures are small, all of one size, and fit the budget in bytes."""
    train, test = dataset.train, dataset.test
    if not (isinstance(train, EncodedImages) and isinstance(test, EncodedImages)):
        return dataset
    first = _pixels(train, 0)
    if first is None or max(first.shape) > _SMALL or (len(train) + len(test)) * first.size > budget:
        return dataset
    splits = [_decode_all(gallery, first.shape, progress) for gallery in (train, test)]
    if splits[0] is None or splits[1] is None:
        return dataset
    return Dataset(dataset.name, splits[0], splits[1], dataset.classes, f"{dataset.origin}, in memory")


def _pixels(gallery: EncodedImages, row: int) -> Images | None:
    data = gallery.source.read(row)
    if not isinstance(data, bytes):
        return data
    return decode_image(data, Path(gallery.source.name(row)), channels=3)


def _decode_all(gallery: EncodedImages, shape: tuple[int, ...], progress: Progress) -> Split | None:
    """All pictures; None as soon as one has another size."""
    images = np.empty((len(gallery), *shape), np.uint8)
    for row in range(len(gallery)):
        pixels = _pixels(gallery, row)
        if pixels is None or pixels.shape != shape:
            return None
        images[row] = pixels
        if row % 1000 == 0:
            progress("decode pictures", row, len(gallery))
    return Split(images, gallery.labels)
