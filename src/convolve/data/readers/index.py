"""Where every sample of a split lies: file, offset, length, label. Built once, kept in the cache, verified, reused.

With it any sample is one seek away, also inside a tar or a TFRecord. An index belongs to the exact files that it was
made from: their names, sizes and times are hashed into it, and it is made again when they differ.
"""

import hashlib
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from convolve import device
from convolve.data.dataset import Images, Labels
from convolve.download import Progress
from convolve.errors import DataError
from convolve.files import atomic_file
from convolve.kernels.jpeg import Jpeg, read_jpegs
from convolve.rng import Indices

WHOLE_FILE = -1
_FORMAT = "convolve index 1"
_LARGEST_SAMPLE = 1 << 30
_USUAL_SAMPLE = 1 << 18


@dataclass(frozen=True)
class SampleLocation:
    """One sample while an index is made; `boxes` are left, top, right, bottom of objects as shares of the picture."""

    file: int
    offset: int
    length: int
    label: int
    name: str
    boxes: tuple[tuple[float, float, float, float], ...] = ()


@dataclass(frozen=True)
class Index:
    """Samples of one split: rows of `places` are file number, offset and length in a file below `root`."""

    root: Path
    files: tuple[str, ...]
    places: npt.NDArray[np.int64]
    labels: Labels
    names: tuple[str, ...]
    boxes: npt.NDArray[np.float32]
    box_starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, row: int) -> str:
        """How a message names a sample."""
        path = self.root / self.files[int(self.places[row, 0])]
        return str(path) if self.places[row, 2] == WHOLE_FILE else f"{path}: sample {self.names[row]}"

    def read(self, row: int) -> bytes:
        """The encoded picture of a sample."""
        number, offset, length = self.places[row].tolist()
        path = f"{self.root}/{self.files[number]}"
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # Most pictures are read whole at once, without asking for their size first.
                wanted = _USUAL_SAMPLE if length == WHOLE_FILE else length
                data = os.pread(handle, min(wanted, _LARGEST_SAMPLE), offset)
                if length == WHOLE_FILE:
                    wanted = len(data) if len(data) < _USUAL_SAMPLE else os.fstat(handle).st_size
                    if wanted > len(data):
                        data = os.pread(handle, min(wanted, _LARGEST_SAMPLE), 0)
            finally:
                os.close(handle)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
        if wanted > _LARGEST_SAMPLE:
            raise DataError(f"{self.name(row)}: {wanted} bytes, more than any picture has")
        if len(data) != wanted:
            raise DataError(f"{self.name(row)}: {len(data)} of {wanted} bytes are there; get an undamaged copy")
        return data

    def read_jpegs(self, rows: Sequence[int], memory: Images) -> dict[int, Jpeg]:
        """Those of the pictures that one native call can read; they stay in `memory`."""
        places = self.places[rows]
        paths = [os.fsencode(f"{self.root}/{self.files[number]}") for number in places[:, 0].tolist()]
        found = zip(rows, read_jpegs(paths, places, memory), strict=True)
        return {row: jpeg for row, jpeg in found if jpeg is not None}

    def objects(self, row: int) -> npt.NDArray[np.float32]:
        """Boxes [K, 4] of the objects in a picture."""
        return self.boxes[self.box_starts[row] : self.box_starts[row + 1]]

    def take(self, rows: Indices) -> "Index":
        """Some of the samples."""
        kept = [self.objects(row) for row in rows.tolist()]
        starts = np.cumsum([0, *map(len, kept)])
        boxes = np.concatenate([np.empty((0, 4), np.float32), *kept])
        names = tuple(self.names[row] for row in rows.tolist())
        return Index(self.root, self.files, self.places[rows], self.labels[rows], names, boxes, starts)


def make_index(root: Path, files: Sequence[str], places: Iterable[SampleLocation]) -> Index:
    """An index of the given places."""
    found = list(places)
    if not found:
        raise DataError(f"{root}: no picture in it; get a complete copy")
    return Index(
        root,
        tuple(files),
        np.array([(place.file, place.offset, place.length) for place in found], np.int64),
        np.array([place.label for place in found], np.int64),
        tuple(place.name for place in found),
        np.array([box for place in found for box in place.boxes], np.float32).reshape(-1, 4),
        np.cumsum([0, *(len(place.boxes) for place in found)]).astype(np.int64),
    )


def signature(root: Path, paths: Iterable[Path]) -> str:
    """A hash of names, sizes and times: what an index depends on."""
    digest = hashlib.sha256(_FORMAT.encode())
    for path in paths:
        facts = path.stat()
        digest.update(f"{path.relative_to(root)}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def load_or_build(root: Path, what: str, stamp: str, build: Callable[[], Index]) -> Index:
    """The index of one split from the cache, or built and kept there; without a writable cache it costs time."""
    path = _cache_path(root, what)
    index = _load(path, root, stamp)
    if index is None:
        index = build()
        _store(index, path, stamp)
    return index


def index_shards(
    root: Path,
    shards: Sequence[Path],
    what: str,
    read_places: Callable[[Path, int], list[SampleLocation]],
    progress: Progress,
) -> Index:
    """The samples of one split in the order of its files; `read_places` finds those of one file, given its number."""

    def build() -> Index:
        places: list[SampleLocation] = []
        for number, path in enumerate(shards):
            progress(f"index {what}", number, len(shards))
            places += read_places(path, number)
        return make_index(root, [path.name for path in shards], places)

    return load_or_build(root, what, signature(root, shards), build)


def _cache_path(root: Path, what: str) -> Path:
    key = hashlib.sha256(f"{root.resolve()}\0{what}".encode()).hexdigest()[:24]
    return device.cache_folder() / "indexes" / f"{key}.npz"


def _pack(texts: Sequence[str]) -> npt.NDArray[np.uint8]:
    return np.frombuffer("\n".join(texts).encode("utf-8", "surrogateescape"), np.uint8)


def _unpack(packed: npt.NDArray[np.uint8]) -> tuple[str, ...]:
    return tuple(packed.tobytes().decode("utf-8", "surrogateescape").split("\n"))


def _store(index: Index, path: Path, stamp: str) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as draft:
            np.savez(
                draft,
                stamp=_pack([stamp]),
                files=_pack(index.files),
                places=index.places,
                labels=index.labels,
                names=_pack(index.names),
                boxes=index.boxes,
                box_starts=index.box_starts,
            )


def _load(path: Path, root: Path, stamp: str) -> Index | None:
    """The stored index, or None where it is absent, damaged or about other files."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            if _unpack(stored["stamp"]) != (stamp,):
                return None
            index = Index(
                root,
                _unpack(stored["files"]),
                stored["places"],
                stored["labels"],
                _unpack(stored["names"]),
                stored["boxes"],
                stored["box_starts"],
            )
    except (OSError, ValueError, KeyError, EOFError, UnicodeDecodeError, zipfile.BadZipFile, zlib.error):
        return None
    return index if _is_valid(index) else None


def _is_valid(index: Index) -> bool:
    count = len(index.labels)
    return (
        index.places.shape == (count, 3)
        and len(index.names) == count
        and len(index.box_starts) == count + 1
        and bool((index.places[:, 0] < len(index.files)).all())
        and bool((index.places[:, :2] >= 0).all())
    )
