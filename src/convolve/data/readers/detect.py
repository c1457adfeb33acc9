"""Detect the format of the images in a folder, and open its splits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from convolve.data.dataset import Dataset, Images, Reader
from convolve.data.image_io import decode_image
from convolve.data.loader.decoding import EncodedImages
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.readers import raw_store, tfrecord, webdataset
from convolve.data.readers.annotations import find_annotations, index_annotated
from convolve.data.readers.image_folder import (
    TEST_NAMES,
    SplitFolders,
    find_splits,
    has_class_folders,
    has_images,
    index_folder,
    list_folders,
    split_by_hash,
)
from convolve.data.readers.index import Index
from convolve.data.readers.label_file import find_label_file, index_rows, read_label_file
from convolve.data.readers.splits import DEFAULT_SPLIT, SplitOptions
from convolve.directory import read_regular
from convolve.download import Progress
from convolve.errors import DataError

NAME = "pictures"
_SMALL = 64
_MOST_CLASSES = 1_000_000

SUPPORTED_LAYOUTS = (
    "a folder for each class; train/ with val/, test/ or both, each with a folder for each class; labels.csv with "
    "file,label[,label...][,split]; Tiny ImageNet; ImageNet with its development kit; train-*.tar and "
    "validation-*.tar; train-00000-of-01024 and its companions; a TFDS folder; or a store made by `convolve data "
    "prepare`"
)


def open_images(
    root: Path, origin: str, progress: Progress, options: SplitOptions = DEFAULT_SPLIT
) -> Dataset[EncodedImages] | None:
    """Open the images in a folder as a data set; return None if it contains none. Incomplete data are an error."""
    if not root.is_dir() and find_label_file(root) is None:
        return None
    try:
        for find in (_find_table, _find_raw, _find_tars, _find_records, _find_folders):
            dataset = find(root, origin, progress, options)
            if dataset is not None:
                _require_task(dataset, options.task, root)
                return dataset
    except OSError as error:
        raise DataError(f"{root}: cannot read ({error.strerror or error})") from error
    return None


def _require_task(dataset: Dataset[EncodedImages], task: str, root: Path) -> None:
    if task not in ("auto", dataset.task):
        raise DataError(
            f"--task {task}: each image of {root} has one class; list several labels in labels.csv, or use a data set "
            "in Python"
        )


def open_labeled(root: Path, origin: str, progress: Progress, task: str = "auto") -> Dataset[EncodedImages] | None:
    """Open what can be scored in a folder as the test split: its test split, or all images if it has no splits."""
    if root.is_dir() and find_splits(root) is None and find_label_file(root) is None:
        folders = [folder for folder in list_folders(root) if has_images(folder)]
        if folders and len(folders) == len(list_folders(root)):
            classes = tuple(folder.name for folder in folders)
            whole = index_folder(root, root, classes, progress)
            return Dataset(NAME, _nothing(whole), whole, classes, f"{origin} (folders)", whole.skipped)
    path = find_label_file(root)
    table = None if path is None else read_label_file(path, task)
    if table is not None and "" in table.splits:
        whole = index_rows(table, "")
        origin = f"{origin} ({table.path.name})"
        return Dataset(NAME, _nothing(whole), whole, table.classes, origin, task=table.task)
    return open_images(root, origin, progress, SplitOptions(train=False, task=task))


def _reject_folds(root: Path, options: SplitOptions) -> None:
    if options.fold is not None:
        raise DataError(
            f"--folds {options.fold[1]}: {root} has a validation split; give class folders without a split, or train/ "
            "and test/"
        )


def _find_raw(root: Path, origin: str, progress: Progress, options: SplitOptions) -> Dataset[EncodedImages] | None:
    metadata = webdataset.read_metadata(root)
    if metadata.get("format") != raw_store.FORMAT:
        return None
    _reject_folds(root, options)
    classes = _class_names(metadata, root, 0)
    train, test = (raw_store.open_raw(root, split, len(classes)) for split in ("train", "validation"))
    return Dataset(NAME, train, test, classes, f"{origin} (raw store)")


def _find_tars(root: Path, origin: str, progress: Progress, options: SplitOptions) -> Dataset[EncodedImages] | None:
    shards = webdataset.find_shards(root)
    if shards is None:
        return None
    _reject_folds(root, options)
    if not options.train and shards[1] and webdataset.read_metadata(root).get("classes"):
        test = webdataset.index_tars(root, shards[1], "validation", progress)
        webdataset.require_length(root, "validation", len(test))
        classes = _checked_classes(webdataset.read_metadata(root), root, test, test)
        return Dataset(NAME, _nothing(test), test, classes, f"{origin} (WebDataset)", test.skipped)
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


def _find_records(root: Path, origin: str, progress: Progress, options: SplitOptions) -> Dataset[EncodedImages] | None:
    for kind, find in (("ImageNet TFRecord", tfrecord.find_imagenet), ("TFDS", tfrecord.find_tfds)):
        shards = find(root)
        if shards is not None:
            _reject_folds(root, options)
            train, test = (
                tfrecord.index_records(root, paths, split, progress)
                for paths, split in zip(shards, ("train", "validation"), strict=True)
            )
            path = root / "label.labels.txt"
            names = _read_names(path) if path.is_file() else []
            classes = _checked_classes({"classes": [name for name in names if name]}, root, train, test)
            return Dataset(NAME, train, test, classes, f"{origin} ({kind})")
    return None


def _find_table(root: Path, origin: str, progress: Progress, options: SplitOptions) -> Dataset[EncodedImages] | None:
    path = find_label_file(root)
    if path is None:
        return None
    table = read_label_file(path, options.task)
    splits = {split: index_rows(table, split) for split in table.splits if options.train or split not in ("", "train")}
    if "" in table.splits:
        dataset = _divide(index_rows(table, ""), table.classes, f"{origin} ({path.name})", progress, options)
        return replace(dataset, task=table.task)
    train = splits.get("train") or _nothing(next(iter(splits.values())))
    parts = (train, splits.get("validation"), splits.get("test"))
    dataset = _join_splits(root, parts, table.classes, f"{origin} ({path.name})", progress, options)
    return replace(dataset, task=table.task)


def _find_folders(root: Path, origin: str, progress: Progress, options: SplitOptions) -> Dataset[EncodedImages] | None:
    folders = find_splits(root)
    if folders is not None:
        return _open_splits(root, folders, f"{origin} (folders)", progress, options)
    if not has_class_folders(root):
        return None
    classes = tuple(folder.name for folder in list_folders(root))
    whole = index_folder(root, root, classes, progress)
    return _divide(whole, classes, f"{origin} (folders without a split)", progress, options)


def _divide(
    whole: Index, classes: tuple[str, ...], origin: str, progress: Progress, options: SplitOptions
) -> Dataset[EncodedImages]:
    """Hold out the test split of a folder without splits."""
    by_name = options.rule == "name" and options.fold is None
    rows = split_by_hash(whole) if by_name else options.take_test(whole, progress)
    dataset: Dataset[EncodedImages] = Dataset(
        NAME, whole.take(rows[0]), whole.take(rows[1]), classes, origin, whole.skipped
    )
    return _take_validation(dataset, progress, options) if options.validation_fraction else dataset


def _take_validation(
    dataset: Dataset[EncodedImages], progress: Progress, options: SplitOptions
) -> Dataset[EncodedImages]:
    """Hold out the images that select from the training split."""
    if options.rule == "name" or not options.select or not len(dataset.train):
        return dataset
    train, validation = (dataset.train.take(rows) for rows in options.take_validation(dataset.train, progress))
    return replace(dataset, train=train, validation=validation, test_name="test")


def _open_splits(
    root: Path, folders: SplitFolders, origin: str, progress: Progress, options: SplitOptions
) -> Dataset[EncodedImages]:
    classes = tuple(folder.name for folder in list_folders(folders.train))
    validation = _open_scored(root, folders.validation, classes, progress)
    ignored = options.rule == "name" and validation is not None
    test = None if ignored else _open_scored(root, folders.test, classes, progress)
    scored = test or validation
    if scored is None:
        raise DataError(
            f"{folders.validation or folders.test}: neither class folders nor a file with the classes of its images; "
            "make a folder for each class, or remove it"
        )
    train = index_folder(root, folders.train, classes, progress) if options.train else _nothing(scored)
    dataset = _join_splits(root, (train, validation, test), classes, origin, progress, options)
    unlabeled = folders.test is not None and test is None and not ignored
    skipped = (("test images without labels", 1, f"{folders.test.name}/"),) if unlabeled and folders.test else ()
    return replace(dataset, skipped=(*dataset.skipped, *skipped))


def _open_scored(root: Path, split: Path | None, classes: tuple[str, ...], progress: Progress) -> Index | None:
    """Open a split of class folders, or of images with an annotation file; return None if it has no labels."""
    if split is None:
        return None
    annotations = find_annotations(root, split)
    inner = [folder.name for folder in list_folders(split)]
    if inner and inner != ["images"]:
        return index_folder(root, split, classes, progress)
    if annotations is None or split.name.lower() in TEST_NAMES:
        return None
    return index_annotated(root, split, annotations, classes)


def _join_splits(
    root: Path,
    splits: tuple[Index, Index | None, Index | None],
    classes: tuple[str, ...],
    origin: str,
    progress: Progress,
    options: SplitOptions,
) -> Dataset[EncodedImages]:
    """Return a data set of train, validation and test; what selects is held out from train if it is missing."""
    train, validation, test = splits
    skipped = tuple(entry for split in splits if split is not None for entry in split.skipped)
    scored = validation if test is None else test
    assert scored is not None, "a data set is scored on one split at least"
    dataset: Dataset[EncodedImages] = Dataset(NAME, train, scored, classes, origin, skipped)
    if validation is not None:
        _reject_folds(root, options)
    if validation is not None and test is not None:
        return replace(dataset, validation=validation)
    if test is None and not options.validation_fraction:
        return replace(dataset, test_name="validation")
    if options.fold is not None:
        train, validation = (train.take(rows) for rows in options.take_test(train, progress))
        return replace(dataset, train=train, validation=validation)
    return _take_validation(dataset, progress, options)


def _nothing(index: Index) -> Index:
    return index.take(np.empty(0, np.int64))


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
    readers = [reader for reader in (dataset.train, dataset.validation, dataset.test) if reader is not None]
    try:
        first = _pixels(next(reader for reader in readers if len(reader)), 0)
        if max(first.shape) > _SMALL or sum(map(len, readers)) * first.size > budget:
            return dataset
        decoded = [_decode_all(reader, first.shape, progress) for reader in readers]
    except DataError:
        return dataset  # the loader stops at a broken image, or skips it
    complete = [images for images in decoded if images is not None]
    if len(complete) < len(readers):
        return dataset
    validation = None if dataset.validation is None else complete[1]
    return Dataset(
        dataset.name,
        complete[0],
        complete[-1],
        dataset.classes,
        f"{dataset.origin}, in memory",
        dataset.skipped,
        validation,
        dataset.test_name,
        dataset.task,
    )


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
