"""The `data` verb: what is known and where it is, fetching it, checking it, making it quick to read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from convolve import device
from convolve.config.schema import DataConfig
from convolve.data.builtin import ORIGIN
from convolve.data.catalogue import KNOWN, OTHER_NAMES, Entry, find_entry
from convolve.data.dataset import Dataset, Progress, Samples, Split
from convolve.data.download import fetch_entry, is_intact
from convolve.data.fingerprint import Verdict, compare_contents
from convolve.data.formats import LOOKED_FOR, open_pictures
from convolve.data.inspection import Finding, inspect
from convolve.data.layouts import describe_layouts, read_place
from convolve.data.lookup import cache_folder, explain_supply, infer_entry, is_cached, open_dataset
from convolve.data.prepare import Options, Prepared, prepare
from convolve.errors import ConfigError, DataError, suggest


@dataclass(frozen=True)
class Listing:
    """One known data set; `place` is where it is, None when it has to be fetched first."""

    name: str
    what: str
    place: str | None
    stored_bytes: int
    fetched_bytes: int
    licence: str


@dataclass(frozen=True)
class Supply:
    """Where a data set is after `get`, and whether it had to be fetched."""

    name: str
    place: str
    fetched: bool


@dataclass(frozen=True)
class Report:
    """What a check found; `contents` compares with the published samples, counts are by class name.

    `findings` are about single pictures; `image_shape` is None where sizes differ.
    """

    name: str
    origin: str
    image_shape: tuple[int, int, int] | None
    contents: Verdict
    train_counts: dict[str, int]
    test_counts: dict[str, int]
    findings: list[Finding] = field(default_factory=list)

    @property
    def train_samples(self) -> int:
        """Number of training images."""
        return sum(self.train_counts.values())

    @property
    def test_samples(self) -> int:
        """Number of test images."""
        return sum(self.test_counts.values())


def list_datasets() -> list[Listing]:
    """Every known data set with its place, sizes and licence."""
    return [
        Listing(entry.name, entry.what, _find_place(entry), entry.stored_bytes, entry.fetched_bytes, entry.licence)
        for entry in KNOWN.values()
    ]


def get(name: str, *, progress: Progress) -> Supply:
    """Put a known data set into the cache, unless it is there or shipped; contents in the cache are verified."""
    entry = find_entry(name)
    if entry.shipped:
        return Supply(name, ORIGIN, fetched=False)
    folder = cache_folder(entry)
    present = all(is_intact(folder / file.name, file) for file in entry.files)
    try:
        fetch_entry(entry, folder, progress)
    except DataError as error:
        raise DataError(f"{error}; {explain_supply(entry)}") from error
    return Supply(name, f"cache: {folder}", fetched=not present)


def check(target: str, *, announce: Callable[[str], None], progress: Progress) -> Report:
    """Open a known data set by name, where it is found without a download, or whatever known set a folder holds."""
    target = OTHER_NAMES.get(target, target)
    if target in KNOWN:
        dataset = open_dataset(DataConfig(dataset=target, download=False), announce=announce, progress=progress)
        return _report(dataset)
    folder = Path(target)
    if not folder.exists():
        raise ConfigError(f"data check {target}: neither a folder nor a known data set; {suggest(target, KNOWN)}")
    pictures = None if infer_entry(folder) else open_pictures(folder, str(folder), progress)
    if pictures is not None:
        return _report_pictures(pictures, folder, progress)
    return _report(_open_folder(folder, progress))


def prepare_pictures(source: Path, target: Path, options: Options, workers: int | None, progress: Progress) -> Prepared:
    """Write the pictures in a folder as WebDataset shards or as a raw store."""
    pictures = open_pictures(source, str(source), progress)
    if pictures is None:
        raise DataError(f"{source}: no pictures in it; looked for {LOOKED_FOR}")
    if target.resolve() == source.resolve():
        raise ConfigError(f"data prepare {source} {target}: the same folder twice; give a new one to write to")
    threads = device.usable_threads() if workers is None else workers
    return prepare(pictures, target, options, threads, progress)


def _report_pictures(pictures: Dataset, folder: Path, progress: Progress) -> Report:
    return Report(
        name=pictures.name,
        origin=pictures.origin,
        image_shape=None,
        contents="not compared",
        train_counts=_count(pictures.train, pictures.classes),
        test_counts=_count(pictures.test, pictures.classes),
        findings=inspect(pictures, folder, device.usable_threads(), progress),
    )


def _find_place(entry: Entry) -> str | None:
    if entry.shipped:
        return ORIGIN
    return f"cache: {cache_folder(entry)}" if is_cached(entry) else None


def _open_folder(folder: Path, progress: Progress) -> Dataset:
    """The known data set in a folder; where the layout alone does not tell which one, its labels do."""
    problem: DataError | None = None
    for entry in (entry for entry in KNOWN.values() if not entry.shipped):
        try:
            splits = read_place(folder, entry, progress)
        except DataError as error:
            problem = problem or error
            continue
        if splits is not None:
            return Dataset(entry.name, *splits, entry.classes, str(folder))
    if problem is not None:
        raise problem
    looked = "; ".join(f"for {entry.name}: {describe_layouts(entry)}" for entry in KNOWN.values() if not entry.shipped)
    raise DataError(f"{folder}: no known data set in it; looked {looked}")


def _report(dataset: Dataset) -> Report:
    return Report(
        name=dataset.name,
        origin=dataset.origin,
        image_shape=_shape_of(dataset.train),
        contents=compare_contents(dataset, KNOWN[dataset.name]),
        train_counts=_count(dataset.train, dataset.classes),
        test_counts=_count(dataset.test, dataset.classes),
    )


def _shape_of(samples: Samples) -> tuple[int, int, int]:
    assert isinstance(samples, Split), "known data sets live in memory"
    height, width, channels = samples.images.shape[1:]
    return height, width, channels


def _count(split: Samples, classes: tuple[str, ...]) -> dict[str, int]:
    counts = np.bincount(split.labels, minlength=len(classes)).tolist()
    return dict(zip(classes, counts, strict=True))
