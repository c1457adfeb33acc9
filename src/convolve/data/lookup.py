"""Finding a data set: `--data-dir`, then $DATA_DIR and $DATASETS_DIR, then the cache, then download.

Where only a folder is named, what it holds decides, and its name where contents alone do not tell sets apart.

A data set that was named is found or is an error; only where none was named may the shipped digits stand in for MNIST.

The digits that ship inside the package, brought to the form of MNIST.

The stored images are 8x8 with values 0 to 16. They are enlarged to 20x20 by linear interpolation between pixel centers,
in whole numbers, so that every machine gets the same bytes, and get a margin of 4 pixels. The last 297 are for testing.
The collection came from 43 people; these images are from 13 of them, and the cut by position keeps no writer apart.

Random images in the shape of a real data set, for measurements in which contents do not matter.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from convolve import device
from convolve.config.schema import DataConfig
from convolve.data.catalog import CATALOG, DIGITS, MNIST, DatasetInfo, find_dataset
from convolve.data.dataset import Dataset, Images, Split, make_split
from convolve.data.fetch import fetch_entry, is_intact
from convolve.data.loader.decoding import USUAL_PHOTO_SIZE
from convolve.data.readers.detect import NAME, SUPPORTED_LAYOUTS, load_into_memory, open_images
from convolve.data.readers.known import Splits, describe_layouts, read_place
from convolve.data.readers.mnist import read_images, read_labels
from convolve.download import Progress
from convolve.errors import DataError
from convolve.rng import generator

VARIABLES = ("DATA_DIR", "DATASETS_DIR")
PHOTO_DATASETS = (NAME, "imagenet", "imagefolder", "webdataset", "tfrecord")

_PATH_WORDS = {
    "mnist": ("mnist",),
    "fashion-mnist": ("fashion",),
    "cifar-10": ("cifar10", "cifar-10", "cifar"),
    "cifar-100": ("cifar100", "cifar-100"),
}


def open_dataset(config: DataConfig, *, announce: Callable[[str], None], progress: Progress) -> Dataset:
    """The data set that the config asks for, whole in memory.

    Args:
        announce: gets one line for anything that is not simply as asked, such as a stand-in.
    """
    if config.dataset in PHOTO_DATASETS:
        if config.generated_data or config.synthetic_data:
            return generated_photos(config.image_size or USUAL_PHOTO_SIZE, seed=0)
        return _open_photos(config, progress)
    if config.dataset is None and config.data_dir is not None:
        inferred = infer_entry(config.data_dir)
        pictures = None if inferred else open_images(config.data_dir, f"--data-dir {config.data_dir}", progress)
        if pictures is not None:
            return load_into_memory(pictures, _budget(config), progress)
        config = config.model_copy(update={"dataset": inferred.name if inferred else None})
    entry = MNIST if config.dataset is None else find_dataset(config.dataset)
    if config.generated_data or config.synthetic_data:
        return generated_dataset(entry, seed=0)
    if entry.shipped:
        return load_digits()
    found = find_local(entry, config.data_dir, progress)
    if found is not None:
        return found
    try:
        return _open_cached(entry, config.download, announce, progress)
    except DataError as error:
        if config.dataset is not None:
            raise DataError(f"{error}; {how_to_provide(entry)}") from error
        announce(f"training on the built-in digits, since {error}; with {entry.name} in a folder: --data-dir FOLDER")
        return load_digits()


def _budget(config: DataConfig) -> int:
    return int(config.cache_memory * 1e9) if config.dataset_cache else 0


def _open_photos(config: DataConfig, progress: Progress) -> Dataset:
    """Photographs in `--data-dir` or in a folder that the environment names."""
    places = [(config.data_dir, f"--data-dir {config.data_dir}")] if config.data_dir else []
    places += [(Path(named), f"${name} {named}") for name in VARIABLES if (named := os.environ.get(name))]
    for place, origin in places:
        found = open_images(place, origin, progress)
        if found is not None:
            return load_into_memory(found, _budget(config), progress)
    looked = " and ".join(str(place) for place, _ in places) or "no folder, since none is given with --data-dir FOLDER"
    raise DataError(f"dataset={config.dataset}: no pictures found in {looked}; looked for {SUPPORTED_LAYOUTS}")


def infer_entry(folder: Path) -> DatasetInfo | None:
    """The known set that a folder holds, by its files, and by its name where two sets have files of the same names."""
    present = [entry for entry in CATALOG.values() if not entry.shipped and _has_files(folder, entry)]
    words = str(folder).lower().replace("_", "-")
    named = [entry for entry in present if any(word in words for word in _PATH_WORDS[entry.name])]
    return next(iter(named or present), None)


def _has_files(folder: Path, entry: DatasetInfo) -> bool:
    """Whether the first file of a set is there, in the folder or in a subfolder named after it."""
    names = [entry.files[0].name, f"{entry.files[0].name}.gz", entry.files[0].name.removesuffix(".bin")]
    places = [folder, *(folder / name for name in entry.folders)]
    return any((place / name).is_file() for place in places for name in names)


def find_local(entry: DatasetInfo, data_dir: Path | None, progress: Progress) -> Dataset | None:
    """The data set in `data_dir`, where it must be, or in a folder that the environment names, where it may be."""
    if data_dir is not None:
        if not data_dir.exists():
            raise DataError(f"--data-dir {data_dir}: no such folder; give the one that holds {entry.name}")
        splits = _read(data_dir, entry, progress)
        if splits is None:
            raise DataError(f"--data-dir {data_dir}: {entry.name} is not there; looked for {describe_layouts(entry)}")
        return _as_dataset(entry, splits, f"--data-dir {data_dir}")
    for variable in VARIABLES:
        place = os.environ.get(variable)
        splits = _read(Path(place), entry, progress) if place else None
        if splits is not None:
            return _as_dataset(entry, splits, f"${variable} {place}")
    return None


def cache_folder(entry: DatasetInfo) -> Path:
    """Where fetched files of this data set are kept."""
    return device.cache_folder() / "datasets" / entry.name


def is_cached(entry: DatasetInfo) -> bool:
    """Whether all files are in the cache with their published sizes; the contents are checked when they are read."""
    paths = [cache_folder(entry) / file.name for file in entry.files]
    return all(
        path.is_file() and path.stat().st_size == file.size for path, file in zip(paths, entry.files, strict=True)
    )


def how_to_provide(entry: DatasetInfo) -> str:
    """How a user can provide a data set that cannot be fetched."""
    return (
        f"on a connected machine run `convolve data get {entry.name}` and copy its cache, or put the files "
        f"{', '.join(file.name for file in entry.files)} (raw or .gz) into a folder and give --data-dir FOLDER"
    )


def _read(place: Path, entry: DatasetInfo, progress: Progress) -> Splits | None:
    try:
        return read_place(place, entry, progress)
    except OSError as error:
        raise DataError(f"{place}: cannot be read ({error.strerror or error})") from error


def _open_cached(entry: DatasetInfo, download: bool, announce: Callable[[str], None], progress: Progress) -> Dataset:
    folder = cache_folder(entry)
    damaged = [
        file.name for file in entry.files if (folder / file.name).exists() and not is_intact(folder / file.name, file)
    ]
    if damaged:
        announce(f"{folder}: {', '.join(damaged)} damaged, not used")
    if damaged or not is_cached(entry):
        if not download:
            raise DataError(f"{entry.name} is neither in a data folder nor in the cache {folder}, and download is off")
        fetch_entry(entry, folder, progress)
    splits = _read(folder, entry, progress)
    if splits is None:
        raise DataError(f"{folder}: {entry.name} vanished from the cache while it was read; start again")
    return _as_dataset(entry, splits, f"cache: {folder}")


def _as_dataset(entry: DatasetInfo, splits: Splits, origin: str) -> Dataset:
    return Dataset(entry.name, *splits, entry.classes, origin)


ORIGIN = "shipped with convolve"
_FOLDER = Path(__file__).parent / "digits"
_SMALL, _LARGE, _MARGIN, _BRIGHTEST = 8, 20, 4, 16


def load_digits() -> Dataset:
    """The shipped digits as 28x28 gray images, light on dark."""
    images = enlarge(read_images(_FOLDER / "images-idx3-ubyte.gz", limit=1 << 20))
    labels = read_labels(_FOLDER / "labels-idx1-ubyte.gz", limit=1 << 20)
    cut = DIGITS.train_count
    train, test = (
        make_split(images[part], labels[part], classes=len(DIGITS.classes), where=str(_FOLDER))
        for part in (slice(None, cut), slice(cut, None))
    )
    return Dataset(DIGITS.name, train, test, DIGITS.classes, ORIGIN)


def enlarge(small: Images) -> Images:
    """Images [N, 8, 8] of 0 to 16 as [N, 28, 28] of 0 to 255."""
    weights = _interpolation()
    sums = weights @ small.astype(np.int64) @ weights.T
    full = _BRIGHTEST * 100
    large = ((sums * 255 + full // 2) // full).astype(np.uint8)
    return np.pad(large, ((0, 0), (_MARGIN, _MARGIN), (_MARGIN, _MARGIN)))


def _interpolation() -> np.typing.NDArray[np.int64]:
    """Weights [20, 8] in tenths: the center of large pixel i lies at (4 i - 3) / 10 of the small grid."""
    weights = np.zeros((_LARGE, _SMALL), np.int64)
    for row in range(_LARGE):
        left, tenths = divmod(4 * row - 3, 10)
        weights[row, max(left, 0)] += 10 - tenths
        weights[row, min(left + 1, _SMALL - 1)] += tenths
    return weights


def generated_split(count: int, size: int, channels: int, classes: int, seed: int) -> Split:
    """`count` random square images with random labels, the same ones for the same arguments."""
    images = generator(seed, "generated images").integers(0, 256, (count, size, size, channels), np.uint8)
    labels = generator(seed, "generated labels").integers(0, classes, count, np.int64)
    return Split(images, labels)


def generated_dataset(entry: DatasetInfo, seed: int) -> Dataset:
    """Random images with the counts, shape and classes of a known data set."""
    size, _, channels = entry.image_shape
    train, test = (
        generated_split(count, size, channels, len(entry.classes), seed + split)
        for split, count in enumerate((entry.train_count, entry.test_count))
    )
    return Dataset(entry.name, train, test, entry.classes, f"random images in the shape of {entry.name}")


def generated_photos(size: int, seed: int) -> Dataset:
    """A few hundred random color images in a thousand classes, in the place of photographs."""
    train, test = (generated_split(count, size, 3, 1000, seed + split) for split, count in enumerate((512, 128)))
    classes = tuple(str(number) for number in range(1000))
    return Dataset("pictures", train, test, classes, f"random images of {size} x {size}")
