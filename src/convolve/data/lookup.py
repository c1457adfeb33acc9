"""Find a data set: in `--data-dir`, then $DATA_DIR and $DATASETS_DIR, then the cache, then by download.

If only a folder is given, its contents decide, and its name if several data sets have the same file names. A data set
named explicitly must be found. Only the default, MNIST, falls back to the built-in digits.

The built-in digits are 8x8 images with values 0 to 16. They are enlarged to 20x20 by linear interpolation between pixel
centers, in integers, so every machine gets the same bytes, and get a margin of 4 pixels, as in MNIST. The last 297 are
for testing. The collection was written by 43 people; these images are by 13 of them, and the split by position does not
separate writers.

Random images in the shape of a real data set serve measurements in which the contents do not matter.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from convolve import device
from convolve.config.defaults import PHOTO_DATASETS
from convolve.config.schema import DataConfig
from convolve.data.catalog import CATALOG, DIGITS, MNIST, DatasetInfo, find_dataset
from convolve.data.dataset import Dataset, Images, Reader, Task
from convolve.data.fetch import fetch_entry, is_intact
from convolve.data.loader.decoding import USUAL_PHOTO_SIZE, EncodedImages
from convolve.data.loader.in_memory import InMemoryImages, check_images
from convolve.data.readers.cifar import Splits
from convolve.data.readers.detect import NAME, SUPPORTED_LAYOUTS, load_into_memory, open_images, open_labeled
from convolve.data.readers.index import Index
from convolve.data.readers.known import describe_layouts, read_known
from convolve.data.readers.mnist import read_images, read_labels
from convolve.data.readers.splits import SplitOptions
from convolve.download import Progress
from convolve.errors import DataError, suggest
from convolve.rng import generator

VARIABLES = ("DATA_DIR", "DATASETS_DIR")

_PATH_WORDS = {
    "mnist": ("mnist",),
    "fashion-mnist": ("fashion",),
    "cifar-10": ("cifar10", "cifar-10", "cifar"),
    "cifar-100": ("cifar100", "cifar-100"),
}


def open_dataset(
    config: DataConfig, *, announce: Callable[[str], None], progress: Progress, train: bool = True, least: int = 1
) -> Dataset[Reader]:
    """Open the data set of a config. Catalog data sets and small images are read into memory, photographs are indexed.

    Args:
        announce: receives one line about anything unexpected, such as a fallback to the built-in digits.
        train: False leaves the training split of a folder empty and unread.
        least: global batch; the number of generated photographs is a multiple of it, so every step is a whole one.
    """
    if config.dataset in PHOTO_DATASETS:
        if config.generated_data or config.synthetic_data:
            return generated_photos(config.image_size or USUAL_PHOTO_SIZE, seed=0, multiple_of=least)
        return _open_photos(config, progress, train)
    if config.dataset is None and config.data_dir is not None:
        inferred = infer_entry(config.data_dir)
        origin = f"--data-dir {config.data_dir}"
        photos = None if inferred else _open_folder(config, config.data_dir, origin, progress, train)
        if photos is not None:
            return photos
        if inferred is None and config.data_dir.exists() and _read(config.data_dir, MNIST, progress) is None:
            raise DataError(f"--data-dir {config.data_dir}: no labeled images in it; looked for {SUPPORTED_LAYOUTS}")
        config = config.model_copy(update={"dataset": inferred.name if inferred else None})
    return open_known(config, announce=announce, progress=progress)


def open_known(config: DataConfig, *, announce: Callable[[str], None], progress: Progress) -> Dataset[InMemoryImages]:
    """Open a catalog data set; by default MNIST, or the built-in digits if MNIST is unavailable."""
    entry = MNIST if config.dataset is None else find_dataset(config.dataset)
    if config.task not in ("auto", "single-label"):
        raise DataError(f"--task {config.task}: each image of {entry.name} has one class; omit it")
    if config.generated_data or config.synthetic_data:
        return generated_dataset(entry, seed=0)
    if entry.shipped:
        return load_digits()
    local = find_local(entry, config.data_dir, progress)
    if local is not None:
        return local
    try:
        return _open_cached(entry, config.download, announce, progress)
    except DataError as error:
        if config.dataset is not None:
            raise DataError(f"{error}; {how_to_provide(entry)}") from error
        announce(f"training on the built-in digits, since {error}; with {entry.name} in a folder: --data-dir FOLDER")
        return load_digits()


def _budget(config: DataConfig) -> int:
    return int(config.cache_memory * 1e9) if config.dataset_cache else 0


def split_options(config: DataConfig, *, train: bool = True) -> SplitOptions:
    """Return how the config splits a folder; without `train`, only the test split is opened."""
    fold = None if config.folds is None else (config.fold or 0, config.folds)
    return SplitOptions(
        config.test_fraction, config.validation_fraction, config.split_rule, fold, train=train, task=config.task
    )


def _open_folder(
    config: DataConfig, folder: Path, origin: str, progress: Progress, train: bool
) -> Dataset[Reader] | None:
    photos = open_images(folder, origin, progress, split_options(config, train=train))
    return None if photos is None else load_into_memory(photos, _budget(config), progress)


def _open_photos(config: DataConfig, progress: Progress, train: bool) -> Dataset[Reader]:
    """Open the photographs in `--data-dir` or in a folder of the environment variables."""
    folders = [(config.data_dir, f"--data-dir {config.data_dir}")] if config.data_dir else []
    folders += [(Path(path), f"${name} {path}") for name in VARIABLES if (path := os.environ.get(name))]
    for folder, origin in folders:
        photos = _open_folder(config, folder, origin, progress, train)
        if photos is not None:
            return photos
    searched = " and ".join(str(folder) for folder, _ in folders)
    problem = f"no images in {searched}; looked for" if folders else "no folder; give --data-dir FOLDER with"
    raise DataError(f"--dataset {config.dataset}: {problem} {SUPPORTED_LAYOUTS}")


def open_scored(
    folder: Path, dataset: str | None, classes: tuple[str, ...], progress: Progress, task: Task = "single-label"
) -> Dataset[Reader]:
    """Open the images of any labeled folder to score a model: the test split, or all images if there are no splits.

    Args:
        dataset: data set of the model; if the folder contains it, its test split is opened.
        classes: those of the model; labels are matched by name.
        task: that of the model.
    """
    subject = f"--data-dir {folder}"
    if not folder.exists():
        raise DataError(f"{subject}: no such folder; give one with a folder of images for each class")
    entry = CATALOG.get(dataset or "")
    splits = None if entry is None or entry.shipped else _read(folder, entry, progress)
    if entry is not None and splits is not None:
        return _as_dataset(entry, splits, subject)
    images = open_labeled(folder, subject, progress, task)
    if images is None:
        raise DataError(f"{subject}: no labeled images in it; looked for {SUPPORTED_LAYOUTS}")
    return match_classes(images, classes, subject)


def match_classes(dataset: Dataset[EncodedImages], classes: tuple[str, ...], subject: str) -> Dataset[EncodedImages]:
    """Return the data set with labels of these classes, matched by name."""
    unknown = [name for name in dataset.classes if name not in classes]
    if unknown:
        raise DataError(f"{subject}: class '{unknown[0]}' is unknown to the model; {suggest(unknown[0], classes)}")
    if dataset.classes == classes:
        return dataset
    numbers = np.array([classes.index(name) for name in dataset.classes], np.int64)
    assert isinstance(dataset.test, Index), "other formats have the classes of their metadata"
    labels = dataset.test.labels
    if labels.ndim == 2:
        matrix = np.zeros((len(labels), len(classes)), np.int64)
        matrix[:, numbers] = labels
    test = replace(dataset.test, labels=numbers[labels] if labels.ndim == 1 else matrix)
    return replace(dataset, train=test.take(np.empty(0, np.int64)), test=test, classes=classes)


def infer_entry(folder: Path) -> DatasetInfo | None:
    """Return the catalog data set in a folder, by its files, or by its name if two sets have the same file names."""
    present = [entry for entry in CATALOG.values() if not entry.shipped and _has_files(folder, entry)]
    words = str(folder).lower().replace("_", "-")
    named = [entry for entry in present if any(word in words for word in _PATH_WORDS[entry.name])]
    return next(iter(named or present), None)


def _has_files(folder: Path, entry: DatasetInfo) -> bool:
    """Look for the first file of a set in the folder or in a subfolder named after it."""
    names = [entry.files[0].name, f"{entry.files[0].name}.gz", entry.files[0].name.removesuffix(".bin")]
    folders = [folder, *(folder / name for name in entry.folders)]
    return any((root / name).is_file() for root in folders for name in names)


def find_local(entry: DatasetInfo, data_dir: Path | None, progress: Progress) -> Dataset[InMemoryImages] | None:
    """Read a data set from `data_dir`, which must contain it, or else from the first environment folder with it."""
    if data_dir is not None:
        if not data_dir.exists():
            raise DataError(f"--data-dir {data_dir}: no such folder; give the one that contains {entry.name}")
        splits = _read(data_dir, entry, progress)
        if splits is None:
            raise DataError(f"--data-dir {data_dir}: no {entry.name} in it; looked for {describe_layouts(entry)}")
        return _as_dataset(entry, splits, f"--data-dir {data_dir}")
    for variable in VARIABLES:
        path = os.environ.get(variable)
        splits = _read(Path(path), entry, progress) if path else None
        if splits is not None:
            return _as_dataset(entry, splits, f"${variable} {path}")
    return None


def cache_folder(entry: DatasetInfo) -> Path:
    """Return the folder for fetched files of this data set."""
    return device.cache_folder() / "datasets" / entry.name


def is_cached(entry: DatasetInfo) -> bool:
    """Check that all files are in the cache with their published sizes; contents are checked when they are read."""
    paths = [cache_folder(entry) / file.name for file in entry.files]
    return all(
        path.is_file() and path.stat().st_size == file.size for path, file in zip(paths, entry.files, strict=True)
    )


def how_to_provide(entry: DatasetInfo) -> str:
    """Return instructions for providing a data set that cannot be fetched."""
    return (
        f"on a connected machine run `convolve data get {entry.name}` and copy its cache, or put the files "
        f"{', '.join(file.name for file in entry.files)} (raw or .gz) into a folder and give --data-dir FOLDER"
    )


def _read(path: Path, entry: DatasetInfo, progress: Progress) -> Splits | None:
    try:
        return read_known(path, entry, progress)
    except OSError as error:
        raise DataError(f"{path}: cannot read ({error.strerror or error})") from error


def _open_cached(
    entry: DatasetInfo, download: bool, announce: Callable[[str], None], progress: Progress
) -> Dataset[InMemoryImages]:
    folder = cache_folder(entry)
    damaged = [
        file.name for file in entry.files if (folder / file.name).exists() and not is_intact(folder / file.name, file)
    ]
    if damaged:
        announce(f"{folder}: ignoring damaged {', '.join(damaged)}")
    if damaged or not is_cached(entry):
        if not download:
            raise DataError(f"{entry.name} is neither in a data folder nor in the cache {folder}, and download is off")
        fetch_entry(entry, folder, progress)
    splits = _read(folder, entry, progress)
    if splits is None:
        raise DataError(f"{folder}: {entry.name} vanished from the cache while it was read; start again")
    return _as_dataset(entry, splits, f"cache: {folder}")


def _as_dataset(entry: DatasetInfo, splits: Splits, origin: str) -> Dataset[InMemoryImages]:
    return Dataset(entry.name, *splits, entry.classes, origin)


ORIGIN = "shipped with convolve"
_FOLDER = Path(__file__).parent / "digits"
_SMALL, _LARGE, _MARGIN, _BRIGHTEST = 8, 20, 4, 16


def load_digits() -> Dataset[InMemoryImages]:
    """Return the built-in digits as 28x28 gray images, light on dark."""
    images = enlarge(read_images(_FOLDER / "images-idx3-ubyte.gz", limit=1 << 20))
    labels = read_labels(_FOLDER / "labels-idx1-ubyte.gz", limit=1 << 20)
    cut = DIGITS.train_count
    train, test = (
        check_images(images[part], labels[part], classes=len(DIGITS.classes), source=str(_FOLDER))
        for part in (slice(None, cut), slice(cut, None))
    )
    return Dataset(DIGITS.name, train, test, DIGITS.classes, ORIGIN)


def enlarge(small: Images) -> Images:
    """Convert images [N, 8, 8] of 0 to 16 to [N, 28, 28] of 0 to 255."""
    weights = _interpolation()
    sums = weights @ small.astype(np.int64) @ weights.T
    full = _BRIGHTEST * 100
    large = ((sums * 255 + full // 2) // full).astype(np.uint8)
    return np.pad(large, ((0, 0), (_MARGIN, _MARGIN), (_MARGIN, _MARGIN)))


def _interpolation() -> np.typing.NDArray[np.int64]:
    """Return weights [20, 8] in tenths: the center of large pixel i is at (4 i - 3) / 10 of the small grid."""
    weights = np.zeros((_LARGE, _SMALL), np.int64)
    for row in range(_LARGE):
        left, tenths = divmod(4 * row - 3, 10)
        weights[row, max(left, 0)] += 10 - tenths
        weights[row, min(left + 1, _SMALL - 1)] += tenths
    return weights


def generated_split(count: int, size: int, channels: int, classes: int, seed: int) -> InMemoryImages:
    """Return `count` random square images with random labels, the same ones for the same arguments."""
    images = generator(seed, "generated images").integers(0, 256, (count, size, size, channels), np.uint8)
    labels = generator(seed, "generated labels").integers(0, classes, count, np.int64)
    return InMemoryImages(images, labels)


def generated_dataset(entry: DatasetInfo, seed: int) -> Dataset[InMemoryImages]:
    """Return random images with the counts, shape and classes of a known data set."""
    size, _, channels = entry.image_shape
    train, test = (
        generated_split(count, size, channels, len(entry.classes), seed + split)
        for split, count in enumerate((entry.train_count, entry.test_count))
    )
    return Dataset(entry.name, train, test, entry.classes, f"random images in the shape of {entry.name}")


def generated_photos(size: int, seed: int, multiple_of: int = 1) -> Dataset[InMemoryImages]:
    """Return random color images in a thousand classes, in place of photographs: 512 or more to train, 128 to test."""
    whole = -(-512 // multiple_of) * multiple_of
    train, test = (generated_split(count, size, 3, 1000, seed + split) for split, count in enumerate((whole, 128)))
    classes = tuple(str(number) for number in range(1000))
    return Dataset(NAME, train, test, classes, f"random images of {size} x {size}")
