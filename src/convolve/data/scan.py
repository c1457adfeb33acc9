"""One pass over the images of a reader: content hash, size, color mode, rotation, thumbnail, unreadable files.

Splits need it to keep duplicates together, and the data checks to find them. JPEGs are decoded at an eighth of their
size, which still reads every byte, so damage anywhere in the file is found. The result for a file is cached as long as
its size and time stay the same.
"""

import hashlib
import io
import json
import os
import zipfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from PIL import Image

from convolve import device
from convolve.data.dataset import Images
from convolve.data.image_io import MAX_PIXELS, decode_image_in_thread, too_large_error
from convolve.data.loader.decoding import EncodedImages
from convolve.download import Progress
from convolve.errors import DataError
from convolve.files import atomic_file
from convolve.kernels.resize import ResizeJob, resize
from convolve.rng import Indices

THUMBNAIL = 32
_FORMAT = "convolve scan 1"
_ARRAYS = ("digests", "sizes", "orientations", "thumbnails")
_DIGEST_BYTES = 16
_CHUNK = 64
_SMALLEST_SIDE = 2 * THUMBNAIL
_MOST_CACHED = 50_000
_JPEG = b"\xff\xd8\xff"
_SPACES = {"YCbCr": "RGB", "RGB": "RGB", "Gray": "L"}
_TURNS = {3: 2, 6: 3, 8: 1}  # EXIF orientation: quarter turns counterclockwise
_ORIENTATION = 0x0112
_LUMA = np.array((77, 150, 29), np.int64)  # of 256


@dataclass(frozen=True)
class Scan:
    """One row for each image: hash of the bytes, height and width as stored, EXIF orientation (1: upright), gray
    thumbnail [32, 32], color mode as Pillow names it, and the problem of an unreadable image (else empty)."""

    digests: npt.NDArray[np.uint8]
    sizes: npt.NDArray[np.int32]
    orientations: npt.NDArray[np.uint8]
    thumbnails: Images
    modes: tuple[str, ...]
    problems: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.digests)

    @property
    def readable(self) -> npt.NDArray[np.bool_]:
        """True for images that can be decoded."""
        return np.array([not problem for problem in self.problems], np.bool_)

    def key(self, row: int) -> bytes:
        """Return the content hash of an image."""
        key: bytes = self.digests[row].tobytes()
        return key

    def take(self, rows: Indices) -> "Scan":
        """Return some of the rows."""
        modes, problems = (tuple(texts[row] for row in rows.tolist()) for texts in (self.modes, self.problems))
        return Scan(
            self.digests[rows], self.sizes[rows], self.orientations[rows], self.thumbnails[rows], modes, problems
        )


def join_scans(scans: Sequence[Scan]) -> Scan:
    """Return the rows of several scans as one."""
    digests, sizes, orientations, thumbnails = (
        np.concatenate(parts) for parts in zip(*map(_arrays, scans), strict=True)
    )
    modes = tuple(mode for scan in scans for mode in scan.modes)
    problems = tuple(problem for scan in scans for problem in scan.problems)
    return Scan(digests, sizes, orientations, thumbnails, modes, problems)


def scan_images(reader: EncodedImages, progress: Progress, *, workers: int | None = None) -> Scan:
    """Scan every image of a reader; files that have not changed since the last scan are not read again."""
    stamps = _stamps(reader)
    path = _cache_path(reader, stamps)
    cached = _load(path, stamps) if path else None
    if cached is not None:
        return cached
    scan = _blank(len(reader))
    modes, problems = [""] * len(reader), [""] * len(reader)
    threads = device.available_threads() if workers is None else max(workers, 1)
    chunks = [range(start, min(start + _CHUNK, len(reader))) for start in range(0, len(reader), _CHUNK)]
    with ThreadPoolExecutor(threads, "scan") as pool:
        for chunk, facts in zip(chunks, pool.map(lambda chunk: _scan_chunk(reader, chunk, scan), chunks), strict=True):
            for row, (mode, problem) in zip(chunk, facts, strict=True):
                modes[row], problems[row] = mode, problem
            progress("check images", chunk.stop, len(reader))
    scan = replace(scan, modes=tuple(modes), problems=tuple(problems))
    if path and len(scan) <= _MOST_CACHED:
        _store(scan, path, stamps)
    return scan


def _blank(count: int) -> Scan:
    return Scan(
        np.zeros((count, _DIGEST_BYTES), np.uint8),
        np.zeros((count, 2), np.int32),
        np.ones(count, np.uint8),
        np.zeros((count, THUMBNAIL, THUMBNAIL), np.uint8),
        (),
        (),
    )


def _scan_chunk(reader: EncodedImages, chunk: range, scan: Scan) -> list[tuple[str, str]]:
    """Fill some rows of a scan; return color mode and problem of each image."""
    facts: list[tuple[str, str]] = []
    jobs: list[ResizeJob] = []
    colors = torch.zeros((len(chunk), THUMBNAIL, THUMBNAIL, 3), dtype=torch.uint8)
    for row, target in zip(chunk, colors.unbind(0), strict=True):
        try:
            data = reader.read(row)
            raw = data if isinstance(data, bytes) else np.ascontiguousarray(data).data
            scan.digests[row] = np.frombuffer(hashlib.sha256(raw).digest()[:_DIGEST_BYTES], np.uint8)
            decoded = _decode(data, reader.name(row)) if isinstance(data, bytes) else _Decoded(data, data.shape[:2])
        except DataError as error:
            facts.append(("", error.problem))
            continue
        scan.sizes[row], scan.orientations[row] = decoded.size, decoded.orientation
        jobs.append(ResizeJob(decoded.pixels, target, False))
        facts.append((decoded.mode, ""))
    resize(jobs)
    scan.thumbnails[chunk.start : chunk.stop] = colors.numpy() @ _LUMA >> 8
    return facts


class _Decoded(NamedTuple):
    """Upright pixels, perhaps decoded smaller; height, width and mode are those of the file."""

    pixels: Images
    size: tuple[int, ...]
    mode: str = "RGB"
    orientation: int = 1


def _decode(data: bytes, name: str) -> _Decoded:
    if not data:
        raise DataError("empty file", subject=name)
    header = _jpeg_header(data)
    if header is None:
        return _decode_other(data, name)
    height, width, mode = header
    if height * width > MAX_PIXELS:
        raise too_large_error(name, (width, height), MAX_PIXELS)
    scale = next((scale for scale in (8, 4, 2) if min(height, width) >= scale * _SMALLEST_SIDE), 1)
    try:
        pixels = simplejpeg.decode_jpeg(
            data,
            colorspace="RGB",
            fastdct=True,
            fastupsample=True,
            min_height=-(-height // scale),
            min_width=-(-width // scale),
        )
    except ValueError:
        return _decode_other(data, name)
    orientation = read_orientation(data)
    upright = np.ascontiguousarray(np.rot90(pixels, _TURNS.get(orientation, 0)))
    return _Decoded(upright, (height, width), mode, orientation)


def _jpeg_header(data: bytes) -> tuple[int, int, str] | None:
    """Return height, width and color mode of a JPEG that libjpeg-turbo can decode to RGB; None for anything else."""
    if not data.startswith(_JPEG):
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (height, width, _SPACES[space]) if space in _SPACES and height and width else None


def _decode_other(data: bytes, name: str) -> _Decoded:
    pixels = decode_image_in_thread(data, name, channels=3)
    with _open_header(data) as image:
        orientation = int(image.getexif().get(_ORIENTATION, 1))
        size, mode = (image.height, image.width), image.mode
    return _Decoded(pixels, size, mode, orientation if 1 <= orientation <= 8 else 1)


def _open_header(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def read_orientation(jpeg: bytes) -> int:
    """Return the EXIF orientation of a JPEG, 1 to 8; 1 (upright) if it has none."""
    start = jpeg.find(b"Exif\0\0", 0, 4096)
    if start < 0:
        return 1
    exif = Image.Exif()
    try:
        exif.load(jpeg[start : start + (64 << 10)])
        orientation = int(exif.get(_ORIENTATION, 1))
    except Exception:  # damaged metadata may raise anything; the pixels are not affected
        return 1
    return orientation if 1 <= orientation <= 8 else 1


def _stamps(reader: EncodedImages) -> list[str]:
    """Return path, size and time of each file; empty if the images are not files."""
    stamps = []
    for row in range(len(reader)):
        file = reader.file(row)
        if file is None:
            return []
        try:
            status = os.stat(file)
        except OSError:
            stamps.append(f"{file}\0")
        else:
            stamps.append(f"{file}\0{status.st_size}\0{status.st_mtime_ns}")
    return stamps


def _cache_path(reader: EncodedImages, stamps: Sequence[str]) -> Path | None:
    if not stamps:
        return None
    key = hashlib.sha256("\n".join(stamps).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return scans_folder() / f"{key}.npz"


def scans_folder() -> Path:
    """Return the folder of everything that is known about image files."""
    return device.cache_folder() / "scans"


def _store(scan: Scan, path: Path, stamps: Sequence[str]) -> None:
    arrays = dict(zip(_ARRAYS, _arrays(scan), strict=True))
    texts = json.dumps([_FORMAT, len(stamps), scan.modes, scan.problems])
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as draft:
            np.savez(draft, texts=np.frombuffer(texts.encode(), np.uint8), **arrays)  # type: ignore[arg-type]


def _load(path: Path, stamps: Sequence[str]) -> Scan | None:
    """Return the cached scan, or None if it is absent or damaged. Its name is a hash of all files and their times."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            form, count, modes, problems = json.loads(stored["texts"].tobytes())
            arrays = [stored[name] for name in _ARRAYS]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    expected = [(part.shape, part.dtype) for part in _arrays(_blank(len(stamps)))]
    same = form == _FORMAT and count == len(stamps) == len(modes) == len(problems)
    if not same or [(part.shape, part.dtype) for part in arrays] != expected:
        return None
    digests, sizes, orientations, thumbnails = arrays
    return Scan(digests, sizes, orientations, thumbnails, tuple(modes), tuple(problems))


def _arrays(scan: Scan) -> list[npt.NDArray[Any]]:
    return [scan.digests, scan.sizes, scan.orientations, scan.thumbnails]
