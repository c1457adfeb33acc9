"""Manifest of a checkpoint: size and sha256 of each file, with a sha256 of the manifest itself; written last.

A checkpoint without a manifest is incomplete. Files are compared with the manifest, and only then parsed. Only the file
names of a checkpoint are accepted, so a manipulated manifest cannot point elsewhere.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from convolve.checkpoint.snapshot import WantsFn, is_checkpoint_file, is_slice, part_of, read_tensors
from convolve.errors import CheckpointError
from convolve.files import has_content, open_run_file, sha256_of
from convolve.run_files import MANIFEST_FILE, STATE_FILE

FORMAT = "convolve-checkpoint"
VERSION = 1
SLICED_VERSION = 2
T = TypeVar("T")
_MAX_MANIFEST_BYTES = 2**20
_REMEDY = "use another checkpoint, or `convolve restore RUN`, which uses the newest intact one"


@dataclass(frozen=True)
class FileEntry:
    """Expected content of one file."""

    sha256: str
    size: int


def describe_files(files: Mapping[str, bytes]) -> dict[str, FileEntry]:
    """Return the entries of these files in a manifest."""
    return {name: FileEntry(_sha256(data), len(data)) for name, data in files.items()}


def encode_manifest(files: Mapping[str, bytes]) -> bytes:
    """Return the manifest of these files."""
    return encode_entries(describe_files(files))


def encode_entries(entries: Mapping[str, FileEntry]) -> bytes:
    """Return the manifest with these entries."""
    version = SLICED_VERSION if any(map(is_slice, entries)) else VERSION
    files = {name: {"bytes": entry.size, "sha256": entry.sha256} for name, entry in entries.items()}
    return _seal({"format": FORMAT, "version": version, "files": files})


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """Return the entries of a checkpoint's manifest by file name."""
    path = folder / MANIFEST_FILE
    raw = _read(path, None, _read_all)
    try:
        content = json.loads(raw)
        del content["sha256"]
        sealed = _seal(content)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _damaged(path, "not a manifest") from None
    if sealed != raw:
        raise _damaged(path, "the sha256 in it differs")
    return _parse(path, content)


def part_sha256(folder: Path, part: str) -> str:
    """Return the sha256 of the file of a part; of several files, that of their sha256."""
    found = [entry.sha256 for name, entry in read_manifest(folder).items() if part_of(name) == part]
    return found[0] if len(found) == 1 else _sha256("".join(found).encode())


def read_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of each file of a checkpoint after comparing them with the manifest."""
    for name, entry in read_manifest(folder).items():
        data = _read(folder / name, entry.size, _read_all)
        _compare(folder / name, _sha256(data), entry)
        yield name, data


def read_slices(folder: Path, wants: WantsFn) -> Iterator[tuple[str, bytes]]:
    """Yield the name of each file of a verified checkpoint, and its bytes with only the wanted tensors."""
    for name, entry in read_manifest(folder).items():
        part = part_of(name)
        read = _read_all if part is None else partial(read_tensors, wants=partial(wants, part))
        yield name, _read(folder / name, entry.size, read)


def verify(folder: Path) -> None:
    """Raise CheckpointError unless every file of a checkpoint is intact; uses constant memory."""
    for name, entry in read_manifest(folder).items():
        _compare(folder / name, _read(folder / name, entry.size, sha256_of), entry)


def compare_written(folder: Path, files: Mapping[str, bytes]) -> None:
    """Read a folder back and raise CheckpointError unless it has these files; takes less time than `verify`."""
    for name, data in files.items():
        if not _read(folder / name, len(data), partial(has_content, data=data)):
            raise _damaged(folder / name, "has other content than was written")


def _compare(path: Path, sha256: str, entry: FileEntry) -> None:
    if sha256 != entry.sha256:
        raise _damaged(path, f"sha256 differs from {MANIFEST_FILE}")


def _parse(path: Path, content: Mapping[str, Any]) -> dict[str, FileEntry]:
    version = content.get("version")
    if content.get("format") != FORMAT or version not in (VERSION, SLICED_VERSION):
        found = f"format {str(content.get('format')):.40} version {str(version):.40}"
        raise CheckpointError(
            f"{path}: {found}: this convolve reads {FORMAT} versions {VERSION} and {SLICED_VERSION}; "
            "use the version that wrote it"
        )
    try:
        entries = {
            str(name): FileEntry(str(item["sha256"]), int(item["bytes"])) for name, item in content["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise _damaged(path, "no list of files") from None
    foreign = sorted(name for name in entries if name == MANIFEST_FILE or not is_checkpoint_file(name))
    if foreign:
        raise _damaged(path, f"names {foreign[0]!r}, which is no part of a checkpoint")
    if STATE_FILE not in entries:
        raise _damaged(path, f"does not name {STATE_FILE}")
    return entries


def _read(path: Path, size: int | None, read: Callable[[BinaryIO], T]) -> T:
    """Read a regular file of the size in the manifest; None is for the manifest itself."""
    try:
        with open_run_file(path) as file:
            found = os.fstat(file.fileno()).st_size
            if size is not None and found != size:
                raise _damaged(path, f"{found} bytes instead of {size}")
            if size is None and found > _MAX_MANIFEST_BYTES:
                raise _damaged(path, f"{found} bytes are too many for a manifest")
            return read(file)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise _damaged(path, "missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read ({error.strerror}); {_REMEDY}") from error


def _read_all(file: BinaryIO) -> bytes:
    return file.read()


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged checkpoint ({problem}); {_REMEDY}")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _seal(content: Mapping[str, Any]) -> bytes:
    return _canonical({**content, "sha256": _sha256(_canonical(content))})


def _canonical(content: Mapping[str, Any]) -> bytes:
    """Return the only valid encoding of a manifest; any other byte is damage."""
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
