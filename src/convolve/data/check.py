"""List the known data sets, fetch one, and check one: class counts, published contents, and every single image.

Each function here is a subcommand of `convolve data`; the dataclasses are its JSON output.
"""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from convolve import device
from convolve.config.schema import DataConfig
from convolve.data.catalog import ALIASES, CATALOG, DatasetInfo, find_dataset
from convolve.data.dataset import Dataset, Reader
from convolve.data.fetch import fetch_entry, is_intact
from convolve.data.fingerprint import ContentMatch, compare_contents
from convolve.data.loader.decoder import Decoder
from convolve.data.loader.decoding import EncodedImages
from convolve.data.loader.in_memory import InMemoryImages
from convolve.data.lookup import ORIGIN, cache_folder, how_to_provide, infer_entry, is_cached, open_known
from convolve.data.readers.detect import open_images
from convolve.data.readers.known import describe_layouts, read_known
from convolve.data.readers.webdataset import read_metadata
from convolve.data.sampling import count_labels
from convolve.download import Progress
from convolve.errors import ConfigError, DataError, suggest
from convolve.files import file_sha256

MIN_SIDE = 16

_MAGIC = {
    b"\xff\xd8\xff": ("JPEG", (".jpg", ".jpeg")),
    b"\x89PNG": ("PNG", (".png",)),
    b"GIF8": ("GIF", (".gif",)),
    b"BM": ("BMP", (".bmp",)),
    b"RIFF": ("WEBP", (".webp",)),
}

_START_OF_FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}


@dataclass(frozen=True)
class DatasetListing:
    """One known data set; `place` is its location, or None if it must be fetched first."""

    name: str
    what: str
    place: str | None
    stored_bytes: int
    fetched_bytes: int
    licence: str  # a key of `--json` that was published in this spelling


@dataclass(frozen=True)
class FetchReport:
    """Location of a data set, and whether it had to be fetched."""

    name: str
    place: str
    fetched: bool


@dataclass(frozen=True)
class Issue:
    """A problem with one image or file: `kind` is broken, misnamed, CMYK, tiny, duplicate or checksum."""

    kind: str
    name: str
    what: str


@dataclass(frozen=True)
class DataReport:
    """Result of a check: comparison with the published samples, counts by class name, and problems of single images.

    `image_shape` is None if sizes differ.
    """

    name: str
    origin: str
    image_shape: tuple[int, int, int] | None
    contents: ContentMatch
    train_counts: dict[str, int]
    test_counts: dict[str, int]
    findings: list[Issue] = field(default_factory=list)

    @property
    def train_samples(self) -> int:
        return sum(self.train_counts.values())

    @property
    def test_samples(self) -> int:
        return sum(self.test_counts.values())


def list_datasets() -> list[DatasetListing]:
    """Return every known data set with its location, sizes and license."""
    return [
        DatasetListing(entry.name, entry.what, _location(entry), entry.stored_bytes, entry.fetched_bytes, entry.license)
        for entry in CATALOG.values()
    ]


def _location(entry: DatasetInfo) -> str | None:
    if entry.shipped:
        return ORIGIN
    return f"cache: {cache_folder(entry)}" if is_cached(entry) else None


def fetch_dataset(name: str, *, progress: Progress) -> FetchReport:
    """Fetch a known data set into the cache, unless it is built in or cached; cached contents are verified."""
    entry = find_dataset(name)
    if entry.shipped:
        return FetchReport(name, ORIGIN, fetched=False)
    folder = cache_folder(entry)
    present = all(is_intact(folder / file.name, file) for file in entry.files)
    try:
        fetch_entry(entry, folder, progress)
    except DataError as error:
        raise DataError(f"{error}; {how_to_provide(entry)}") from error
    return FetchReport(name, f"cache: {folder}", fetched=not present)


def check_data(target: str, *, announce: Callable[[str], None], progress: Progress) -> DataReport:
    """Check a known data set by name, without downloading it, or the data set in a folder."""
    target = ALIASES.get(target, target)
    if target in CATALOG:
        config = DataConfig(dataset=target, download=False)
        return _check_known(open_known(config, announce=announce, progress=progress))
    folder = Path(target)
    if not folder.exists():
        raise ConfigError(f"data check {target}: neither a folder nor a known data set; {suggest(target, CATALOG)}")
    images = None if infer_entry(folder) else open_images(folder, str(folder), progress)
    if images is None:
        return _check_known(_open_folder(folder, progress))
    return _report(images, "not compared", inspect_images(images, folder, device.available_threads(), progress))


def _open_folder(folder: Path, progress: Progress) -> Dataset[InMemoryImages]:
    """Open the known data set in a folder; if several have the same layout, its labels decide."""
    problem: DataError | None = None
    entries = [entry for entry in CATALOG.values() if not entry.shipped]
    for entry in entries:
        try:
            splits = read_known(folder, entry, progress)
        except DataError as error:
            problem = problem or error
            continue
        if splits is not None:
            return Dataset(entry.name, *splits, entry.classes, str(folder))
    if problem is not None:
        raise problem
    layouts = "; ".join(f"for {entry.name}: {describe_layouts(entry)}" for entry in entries)
    raise DataError(f"{folder}: contains no known data set; looked {layouts}")


def _check_known(dataset: Dataset[InMemoryImages]) -> DataReport:
    return _report(dataset, compare_contents(dataset, CATALOG[dataset.name]), [])


def _report(dataset: Dataset[Reader], contents: ContentMatch, issues: list[Issue]) -> DataReport:
    train, test = (
        dict(zip(dataset.classes, count_labels(reader.labels, len(dataset.classes)).tolist(), strict=True))
        for reader in (dataset.train, dataset.test)
    )
    return DataReport(dataset.name, dataset.origin, dataset.train.image_shape, contents, train, test, issues)


def inspect_images(dataset: Dataset[EncodedImages], root: Path, workers: int, progress: Progress) -> list[Issue]:
    """Return the wrong checksums of prepared files, then the problems of all images in the order of the samples."""
    issues = list(_check_checksums(root, progress))
    first_names: dict[bytes, str] = {}
    for split, reader in (("train", dataset.train), ("test", dataset.test)):
        with ThreadPoolExecutor(max(workers, 1), "check") as pool:
            inspected = pool.map(lambda row, reader=reader: _inspect(reader, row), range(len(reader)))
            for row, (digest, found) in enumerate(inspected):
                issues += found
                name = reader.name(row)
                other = first_names.setdefault(digest, name)
                if digest and other != name:
                    issues.append(Issue("duplicate", name, f"the same bytes as {other}"))
                if row % 100 == 0:
                    progress(f"check {split}", row, len(reader))
    return issues


def _check_checksums(root: Path, progress: Progress) -> Iterator[Issue]:
    checksums = read_metadata(root).get("checksums", {})
    if not isinstance(checksums, dict):
        return
    for number, (name, expected) in enumerate(checksums.items()):
        progress("checksums", number, len(checksums))
        path = root / Path(str(name)).name
        if not path.is_file():
            yield Issue("checksum", str(path), "is missing")
        elif file_sha256(path) != expected:
            yield Issue("checksum", str(path), "has other contents than were written")


def _inspect(reader: EncodedImages, row: int) -> tuple[bytes, list[Issue]]:
    """Return the hash of an image, empty if it cannot be read, and its problems."""
    name, digest, issues = reader.name(row), b"", []
    pixels = torch.empty((MIN_SIDE, MIN_SIDE, 3), dtype=torch.uint8)
    size: list[tuple[int, int]] = []

    def choose_box(full: tuple[int, int]) -> tuple[int, int, int, int]:
        size.append(full)
        # A small box makes the decoder run at full scale, so damage anywhere in the image is found.
        return 0, 0, min(full[0], MIN_SIDE), min(full[1], MIN_SIDE)

    try:
        data = reader.read(row)
        digest = hashlib.sha256(data if isinstance(data, bytes) else np.ascontiguousarray(data).data).digest()
        Decoder(reader, 0).decode(row, choose_box, pixels, flip=False)
        if min(size[0]) < MIN_SIDE:
            issues.append(Issue("tiny", name, f"{size[0][1]} x {size[0][0]} pixels"))
        if isinstance(data, bytes):
            issues += _inspect_bytes(name, reader.file(row), data)
    except DataError as error:
        issues.append(Issue("broken", name, error.problem))
    return digest, issues


def _inspect_bytes(name: str, file: Path | None, data: bytes) -> Iterator[Issue]:
    kind, suffixes = next((known for magic, known in _MAGIC.items() if data.startswith(magic)), ("", ()))
    suffix = "" if file is None else file.suffix.lower()
    if kind and suffix and suffix not in suffixes:
        yield Issue("misnamed", name, f"contains {kind}")
    if kind == "JPEG" and _count_components(data) == 4:
        yield Issue("CMYK", name, "four color channels; converting it takes time")


def _count_components(jpeg: bytes) -> int:
    """Return the number of color channels in the frame header of a JPEG, or 0 if it has none."""
    at = 2
    while at + 9 < len(jpeg) and jpeg[at] == 0xFF:
        if jpeg[at + 1] in _START_OF_FRAME:
            return jpeg[at + 9]
        at += 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
    return 0
