"""Looking at every picture of a data set: what is broken, odd, doubled or not what its name says.

Recognizing known contents, in the published order (sha256 of IDX files) or in any other (sum of sample hashes).

The `data` verb: what is known and where it is, fetching it, checking it, making it quick to read.
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
from convolve.data.dataset import Dataset, Samples, Split
from convolve.data.fetch import fetch_entry, is_intact
from convolve.data.fingerprint import ContentMatch, compare_contents
from convolve.data.image_io import Decoder
from convolve.data.loader.decoding import EncodedImages, EncodedSource
from convolve.data.lookup import ORIGIN, cache_folder, how_to_provide, infer_entry, is_cached, open_dataset
from convolve.data.readers.detect import open_images
from convolve.data.readers.known import describe_layouts, read_place
from convolve.data.readers.webdataset import read_metadata
from convolve.download import Progress
from convolve.errors import ConfigError, DataError, suggest
from convolve.files import file_sha256

MIN_SIDE = 16

_KINDS = {
    b"\xff\xd8\xff": ("JPEG", (".jpg", ".jpeg")),
    b"\x89PNG": ("PNG", (".png",)),
    b"GIF8": ("GIF", (".gif",)),
    b"BM": ("BMP", (".bmp",)),
    b"RIFF": ("WEBP", (".webp",)),
}

_START_OF_FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}


@dataclass(frozen=True)
class Issue:
    """Something about one picture: `kind` is broken, misnamed, CMYK, tiny, duplicate or checksum."""

    kind: str
    name: str
    what: str


@dataclass(frozen=True)
class _ImageFacts:
    name: str
    digest: bytes
    findings: tuple[Issue, ...]


def inspect_images(dataset: Dataset, root: Path, workers: int, progress: Progress) -> list[Issue]:
    """Every finding, in the order of the samples; checksums of prepared files first."""
    findings = list(check_files(root, progress))
    first_seen: dict[bytes, str] = {}
    for what, samples in (("train", dataset.train), ("test", dataset.test)):
        assert isinstance(samples, EncodedImages), "pictures are in a gallery"
        source = samples.source
        with ThreadPoolExecutor(max(workers, 1), "check") as pool:
            looks = pool.map(lambda row, source=source: _examine(source, row), range(len(source)))
            for row, look in enumerate(looks):
                findings += look.findings
                other = first_seen.setdefault(look.digest, look.name)
                if look.digest and other != look.name:
                    findings.append(Issue("duplicate", look.name, f"the same bytes as {other}"))
                if row % 100 == 0:
                    progress(f"check {what}", row, len(source))
    return findings


def check_files(root: Path, progress: Progress) -> Iterator[Issue]:
    """Prepared files whose contents are not those that were written."""
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


def _examine(source: EncodedSource, row: int) -> _ImageFacts:
    name = source.name(row)
    pixels = torch.empty((MIN_SIDE, MIN_SIDE, 3), dtype=torch.uint8)
    size: list[tuple[int, int]] = []
    findings = []
    digest = b""

    def whole(full: tuple[int, int]) -> tuple[int, int, int, int]:
        size.append(full)
        # All of it at full scale: a box of 16 pixels in a corner would let damage further down go unseen.
        return 0, 0, min(full[0], MIN_SIDE), min(full[1], MIN_SIDE)

    try:
        data = source.read(row)
        digest = hashlib.sha256(data if isinstance(data, bytes) else np.ascontiguousarray(data).data).digest()
        Decoder(source, 0).decode(row, whole, pixels, flip=False)
        if min(size[0]) < MIN_SIDE:
            findings.append(Issue("tiny", name, f"{size[0][1]} x {size[0][0]} pixels"))
        if isinstance(data, bytes):
            findings += _examine_bytes(name, data)
    except DataError as error:
        findings.append(Issue("broken", name, str(error).removeprefix(f"{name}: ")))
    return _ImageFacts(name, digest, tuple(findings))


def _examine_bytes(name: str, data: bytes) -> Iterator[Issue]:
    kind, endings = next((known for magic, known in _KINDS.items() if data.startswith(magic)), ("", ()))
    ending = Path(name).suffix.lower()
    if kind and ending and ": sample" not in name and ending not in endings:
        yield Issue("misnamed", name, f"holds {kind}")
    if kind == "JPEG" and _count_components(data) == 4:
        yield Issue("CMYK", name, "four color channels; it is converted at some cost")


def _count_components(jpeg: bytes) -> int:
    """The number of color channels in a JPEG's frame header; 0 where none is found."""
    at = 2
    while at + 9 < len(jpeg) and jpeg[at] == 0xFF:
        if jpeg[at + 1] in _START_OF_FRAME:
            return jpeg[at + 9]
        at += 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
    return 0


@dataclass(frozen=True)
class DatasetListing:
    """One known data set; `place` is where it is, None when it has to be fetched first."""

    name: str
    what: str
    place: str | None
    stored_bytes: int
    fetched_bytes: int
    licence: str  # a key of `--json` that was published in this spelling


@dataclass(frozen=True)
class FetchReport:
    """Where a data set is after `get`, and whether it had to be fetched."""

    name: str
    place: str
    fetched: bool


@dataclass(frozen=True)
class DataReport:
    """What a check found; `contents` compares with the published samples, counts are by class name.

    `findings` are about single pictures; `image_shape` is None where sizes differ.
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
        """Number of training images."""
        return sum(self.train_counts.values())

    @property
    def test_samples(self) -> int:
        """Number of test images."""
        return sum(self.test_counts.values())


def list_datasets() -> list[DatasetListing]:
    """Every known data set with its place, sizes and license."""
    return [
        DatasetListing(entry.name, entry.what, _location(entry), entry.stored_bytes, entry.fetched_bytes, entry.license)
        for entry in CATALOG.values()
    ]


def fetch_dataset(name: str, *, progress: Progress) -> FetchReport:
    """Put a known data set into the cache, unless it is there or shipped; contents in the cache are verified."""
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
    """Open a known data set by name, where it is found without a download, or whatever known set a folder holds."""
    target = ALIASES.get(target, target)
    if target in CATALOG:
        dataset = open_dataset(DataConfig(dataset=target, download=False), announce=announce, progress=progress)
        return _report(dataset)
    folder = Path(target)
    if not folder.exists():
        raise ConfigError(f"data check {target}: neither a folder nor a known data set; {suggest(target, CATALOG)}")
    pictures = None if infer_entry(folder) else open_images(folder, str(folder), progress)
    if pictures is not None:
        return _report_images(pictures, folder, progress)
    return _report(_open_folder(folder, progress))


def _report_images(pictures: Dataset, folder: Path, progress: Progress) -> DataReport:
    return DataReport(
        name=pictures.name,
        origin=pictures.origin,
        image_shape=None,
        contents="not compared",
        train_counts=_count(pictures.train, pictures.classes),
        test_counts=_count(pictures.test, pictures.classes),
        findings=inspect_images(pictures, folder, device.available_threads(), progress),
    )


def _location(entry: DatasetInfo) -> str | None:
    if entry.shipped:
        return ORIGIN
    return f"cache: {cache_folder(entry)}" if is_cached(entry) else None


def _open_folder(folder: Path, progress: Progress) -> Dataset:
    """The known data set in a folder; where the layout alone does not tell which one, its labels do."""
    problem: DataError | None = None
    for entry in (entry for entry in CATALOG.values() if not entry.shipped):
        try:
            splits = read_place(folder, entry, progress)
        except DataError as error:
            problem = problem or error
            continue
        if splits is not None:
            return Dataset(entry.name, *splits, entry.classes, str(folder))
    if problem is not None:
        raise problem
    looked = "; ".join(
        f"for {entry.name}: {describe_layouts(entry)}" for entry in CATALOG.values() if not entry.shipped
    )
    raise DataError(f"{folder}: no known data set in it; looked {looked}")


def _report(dataset: Dataset) -> DataReport:
    return DataReport(
        name=dataset.name,
        origin=dataset.origin,
        image_shape=_shape_of(dataset.train),
        contents=compare_contents(dataset, CATALOG[dataset.name]),
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
