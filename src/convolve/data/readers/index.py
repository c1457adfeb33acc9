"""File, offset, length and label of every sample of a split, built once and cached.

With an index every sample is random-access, even inside a tar or a TFRecord. An index belongs to the exact files that
it was built from: their names, sizes and times are hashed into it, and it is rebuilt when they differ. A cached index
is mapped into memory, so the processes of a host share it.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from convolve import device
from convolve.data.dataset import Images, Labels, Skipped
from convolve.data.loader.decoding import EncodedImages
from convolve.data.readers.locations import SampleLocation, SkippedEntries
from convolve.data.readers.mapped_arrays import map_arrays, write_arrays
from convolve.data.readers.shards import ArchiveKind, ShardIndexer
from convolve.data.readers.texts import Texts
from convolve.download import Progress
from convolve.errors import DataError
from convolve.files import atomic_file
from convolve.kernels.jpeg import Jpeg, read_jpegs
from convolve.rng import Indices

WHOLE_FILE = -1
_FORMAT = "convolve index 3"
_LARGEST_SAMPLE = 1 << 30
_USUAL_SAMPLE = 1 << 18


@dataclass(frozen=True)
class Index(EncodedImages):
    """A reader of indexed files: rows of `places` are file number, offset and length in a file below `root`."""

    root: Path
    files: Texts
    places: npt.NDArray[np.int64]
    labels: Labels
    names: Texts
    boxes: npt.NDArray[np.float32]
    box_starts: npt.NDArray[np.int64]
    skipped: tuple[Skipped, ...] = ()

    def name(self, row: int) -> str:
        path = self.file(row)
        return f"{self._path(row)}: sample {self.names[row]}" if path is None else str(path)

    def file(self, row: int) -> Path | None:
        return self._path(row) if self.places[row, 2] == WHOLE_FILE else None

    def _path(self, row: int) -> Path:
        return self.root / self.files[int(self.places[row, 0])]

    def read(self, row: int) -> bytes:
        number, offset, length = self.places[row].tolist()
        path = f"{self.root}/{self.files[number]}"
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                # Most images are read whole in one call, without a call for their size.
                expected = _USUAL_SAMPLE if length == WHOLE_FILE else length
                data = os.pread(handle, min(expected, _LARGEST_SAMPLE), offset)
                if length == WHOLE_FILE:
                    expected = len(data) if len(data) < _USUAL_SAMPLE else os.fstat(handle).st_size
                    if expected > len(data):
                        data = os.pread(handle, min(expected, _LARGEST_SAMPLE), 0)
            finally:
                os.close(handle)
        except OSError as error:
            raise DataError(f"cannot read ({error.strerror or error})", subject=path) from error
        if expected > _LARGEST_SAMPLE:
            raise DataError(f"{expected} bytes, more than an image may have", subject=self.name(row))
        if len(data) != expected:
            problem = f"contains {len(data)} of {expected} bytes; get an undamaged copy"
            raise DataError(problem, subject=self.name(row))
        return data

    def read_jpegs(self, rows: Sequence[int], memory: Images) -> dict[int, Jpeg]:
        places = self.places[rows]
        paths = [os.fsencode(f"{self.root}/{self.files[number]}") for number in places[:, 0].tolist()]
        jpegs = zip(rows, read_jpegs(paths, places, memory), strict=True)
        return {row: jpeg for row, jpeg in jpegs if jpeg is not None}

    def objects(self, row: int) -> npt.NDArray[np.float32]:
        return self.boxes[self.box_starts[row] : self.box_starts[row + 1]]

    def take(self, rows: Indices) -> "Index":
        counts, firsts = np.diff(self.box_starts)[rows], self.box_starts[:-1][rows]
        starts = np.concatenate(([0], np.cumsum(counts)))
        boxes = self.boxes[np.repeat(firsts - starts[:-1], counts) + np.arange(starts[-1])]
        return Index(
            self.root,
            self.files,
            self.places[rows],
            self.labels[rows],
            self.names.take(rows),
            boxes,
            starts,
            self.skipped,
        )


def make_index(
    root: Path, files: Sequence[str], samples: Iterable[SampleLocation], skipped: SkippedEntries | None = None
) -> Index:
    """Return an index of the samples."""
    locations = list(samples)
    if not locations:
        raise DataError(f"{root}: contains no image; get a complete copy")
    packed, names = Texts.pack(files), [sample.name for sample in locations]
    return Index(
        root,
        packed,
        np.array([(sample.file, sample.offset, sample.length) for sample in locations], np.int64),
        np.array([sample.label for sample in locations], np.int64),
        packed if names == list(files) else Texts.pack(names),
        np.array([box for sample in locations for box in sample.boxes], np.float32).reshape(-1, 4),
        np.cumsum([0, *(len(sample.boxes) for sample in locations)]).astype(np.int64),
        skipped.listed() if skipped else (),
    )


def signature(root: Path, paths: Iterable[Path]) -> str:
    """Return a hash of names, sizes and times of the files that an index depends on."""
    digest = hashlib.sha256(_FORMAT.encode())
    for path in paths:
        status = path.stat()
        digest.update(
            f"{path.relative_to(root)}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape")
        )
    return digest.hexdigest()


def load_or_build(root: Path, name: str, expected: str, build: Callable[[], Index]) -> Index:
    """Return the cached index of this name if it has the expected signature; otherwise build it and try to cache it."""
    path = _cache_path(root, name)
    index = _load(path, root, expected)
    if index is None:
        index = build()
        _store(index, path, expected)
        index = _load(path, root, expected) or index  # which is smaller
    return index


def index_shards(root: Path, shards: Sequence[Path], name: str, kind: ArchiveKind, progress: Progress) -> Index:
    """Index one split in the order of its files, which are parsed in a sandbox."""

    def build() -> Index:
        samples: list[SampleLocation] = []
        skipped = SkippedEntries()
        with ShardIndexer(kind, shards) as indexer:
            for number, path in enumerate(shards):
                progress(f"index {name}", number, len(shards))
                found, unused = indexer.locate(path, number)
                samples += found
                skipped.update(unused)
        return make_index(root, [path.name for path in shards], samples, skipped)

    return load_or_build(root, name, signature(root, shards), build)


def _cache_path(root: Path, name: str) -> Path:
    key = hashlib.sha256(f"{root.resolve()}\0{name}".encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return device.cache_folder() / "indexes" / f"{key}.index"


def _store(index: Index, path: Path, signature: str) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {
        "files": index.files.encoded,
        "file_ends": index.files.ends,
        "places": index.places,
    }
    arrays |= {"labels": index.labels, "boxes": index.boxes, "box_starts": index.box_starts}
    if index.names is not index.files:
        arrays |= {"names": index.names.encoded, "name_ends": index.names.ends}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as draft:
            write_arrays(draft, {"signature": signature, "skipped": index.skipped}, arrays)
        path.with_suffix(".npz").unlink(missing_ok=True)  # of earlier versions


def _load(path: Path, root: Path, signature: str) -> Index | None:
    """Return the cached index, or None if it is absent, damaged or of other files."""
    try:
        values, stored = map_arrays(path)
        if values["signature"] != signature:
            return None
        files = Texts(stored["files"], stored["file_ends"])
        index = Index(
            root,
            files,
            stored["places"],
            stored["labels"].copy(),
            Texts(stored["names"], stored["name_ends"]) if "names" in stored else files,
            stored["boxes"],
            stored["box_starts"],
            tuple((str(reason), int(count), str(first)) for reason, count, first in values["skipped"]),
        )
        return index if _is_valid(index) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _is_valid(index: Index) -> bool:
    count = len(index.labels)
    return (
        index.places.shape == (count, 3)
        and index.files.is_valid
        and index.names.is_valid
        and len(index.names) == count
        and index.box_starts.shape == (count + 1,)
        and index.boxes.shape == (index.box_starts[-1], 4)
        and index.box_starts[0] == 0
        and bool((np.diff(index.box_starts) >= 0).all())
        and bool((index.places[:, 0] < len(index.files)).all())
        and bool((index.places[:, :2] >= 0).all())
    )
