"""Folders of images by class: `train/`, `val/` and `test/` with a folder for each class, or class folders without a
split. Class folders may contain the images in a folder `images`, as in Tiny ImageNet.

`imagenet_2012_bounding_boxes.csv` beside them (file, x1, y1, x2, y2 as fractions of the image) has boxes of objects.
"""

import csv
import hashlib
import io
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convolve.data.readers.index import (
    WHOLE_FILE,
    Index,
    load_or_build,
    make_index,
    signature,
)
from convolve.data.readers.locations import EXTENSIONS, SampleLocation, SkippedEntries
from convolve.directory import open_regular
from convolve.download import Progress
from convolve.errors import DataError
from convolve.rng import Indices

TRAIN_NAMES = ("train", "training", "ilsvrc2012_img_train")
VALIDATION_NAMES = ("validation", "val", "valid", "ilsvrc2012_img_val")
TEST_NAMES = ("test", "testing")
BOXES_FILE = "imagenet_2012_bounding_boxes.csv"
_TENTHS = 10
_REPORT_EVERY = 5000
Boxes = dict[str, tuple[tuple[float, float, float, float], ...]]


def list_folders(root: Path) -> list[Path]:
    """Return the folders inside a folder, sorted by name."""
    return sorted((item for item in root.iterdir() if item.is_dir() and not item.name.startswith(".")), key=_by_name)


def _by_name(path: Path) -> str:
    return path.name


@dataclass(frozen=True)
class SplitFolders:
    """Folders of the splits."""

    train: Path
    validation: Path | None
    test: Path | None


def find_splits(root: Path) -> SplitFolders | None:
    """Return the folders of the splits, by their usual names, if there is one for training and another."""
    folders = {folder.name.lower(): folder for folder in list_folders(root)}
    train, validation, test = (
        next((folders[name] for name in names if name in folders), None)
        for names in (TRAIN_NAMES, VALIDATION_NAMES, TEST_NAMES)
    )
    if train is None or (validation is None and test is None) or not list_folders(train):
        return None
    return SplitFolders(train, validation, test)


def has_class_folders(root: Path) -> bool:
    """Check that the folders inside look like classes: two or more, each with an image among its first files."""
    folders = list_folders(root)
    return len(folders) >= 2 and all(has_images(folder) for folder in folders[:3])


def has_images(folder: Path) -> bool:
    """Check for an image among the first files of a folder."""
    folder = images_in(folder)
    return any(is_image_name(item.name) for _, item in zip(range(50), folder.iterdir(), strict=False))


def images_in(folder: Path) -> Path:
    """Return the folder `images` in a folder that contains no image itself, as in Tiny ImageNet; else the folder."""
    inner = folder / "images"
    if not inner.is_dir():
        return folder
    return folder if any(is_image_name(item.name) for item in folder.iterdir()) else inner


def is_image_name(name: str) -> bool:
    """Check the suffix of a file name."""
    return Path(name).suffix.lower() in EXTENSIONS


def index_folder(root: Path, split: Path, classes: tuple[str, ...], progress: Progress) -> Index:
    """Index the images of one split folder, by class and then by name."""
    folders = list_folders(split)
    unknown = [folder.name for folder in folders if folder.name not in classes]
    if unknown:
        raise DataError(f"{split / unknown[0]}: train/ has no class of that name; move or remove it")
    boxes_file = root / BOXES_FILE
    inner = [inside for folder in folders if (inside := images_in(folder)) != folder]
    expected = signature(root, [split, *folders, *inner, *([boxes_file] if boxes_file.is_file() else [])])

    def build() -> Index:
        boxes = read_boxes(boxes_file) if boxes_file.is_file() else {}
        skipped = SkippedEntries()
        for item in sorted(set(split.iterdir()) - {*folders, boxes_file}):
            skipped.add("file outside the class folders", str(item.relative_to(root)))
        label_of = {name: label for label, name in enumerate(classes)}
        listed = [(path, label_of[folder.name]) for folder, path in _list_images(folders, progress, skipped)]
        return index_files(root, listed, skipped, boxes)

    return load_or_build(root, f"folder {split.name}", expected, build)


def index_files(
    root: Path, listed: Iterable[tuple[Path, int]], skipped: SkippedEntries, boxes: Boxes | None = None
) -> Index:
    """Return an index of image files below `root` with their labels."""
    pairs = [(str(path.relative_to(root)), label) for path, label in listed]
    samples = (
        SampleLocation(number, 0, WHOLE_FILE, label, file, (boxes or {}).get(Path(file).name, ()))
        for number, (file, label) in enumerate(pairs)
    )
    return make_index(root, [file for file, _ in pairs], samples, skipped)


def _why_skipped(entry: os.DirEntry[str]) -> str | None:
    """Return why an entry of a class folder is not a sample, None for an image."""
    if entry.is_dir():
        return "subfolder of a class folder"
    if not is_image_name(entry.name):
        return "file without the suffix of an image"
    return None if entry.is_file() else "not a regular file"


def _list_images(folders: list[Path], progress: Progress, skipped: SkippedEntries) -> Iterator[tuple[Path, Path]]:
    """Yield class folder and path of every image."""
    done = 0
    for folder in folders:
        inside = images_in(folder)
        with os.scandir(inside) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        for entry in entries:
            reason = _why_skipped(entry)
            if reason is not None:
                skipped.add(reason, f"{folder.name}/{entry.name}")
                continue
            yield folder, inside / entry.name
            done += 1
            if done % _REPORT_EVERY == 0:
                progress("list images", done, None)


def split_by_hash(index: Index) -> tuple[Indices, Indices]:
    """Return rows for training and for testing. Only the name of an image decides, so new images move no old one."""
    is_test = np.array([_is_test_sample(name) for name in index.names])
    if is_test.all() or not is_test.any():
        is_test = np.arange(len(index)) % _TENTHS == 0
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _is_test_sample(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big") % _TENTHS == 0


def read_boxes(path: Path) -> Boxes:
    """Return the boxes of objects by file name; a line that is not one is an error."""
    boxes: dict[str, list[tuple[float, float, float, float]]] = {}
    with io.TextIOWrapper(open_regular(path), newline="", encoding="utf-8", errors="replace") as file:
        for number, row in enumerate(_rows(file, path), 1):
            try:
                x1, y1, x2, y2 = (float(value) for value in row[1:5])
                if not all(map(math.isfinite, (x1, y1, x2, y2))):
                    raise ValueError("not finite")
            except ValueError:
                if number == 1:
                    continue  # a heading
                raise DataError(f"{path}: line {number}: must be a file name and four numbers") from None
            boxes.setdefault(row[0], []).append((x1, y1, x2, y2))
    return {name: tuple(values) for name, values in boxes.items()}


def _rows(file: Iterable[str], path: Path) -> Iterator[list[str]]:
    try:
        yield from csv.reader(file)
    except csv.Error as error:
        raise DataError(f"{path}: not a table ({error}); get an undamaged copy") from None
