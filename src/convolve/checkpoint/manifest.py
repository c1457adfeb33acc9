"""The manifest: size and sha256 of each file of a checkpoint, sealed with a sha256 of itself, and written last.

A checkpoint without a manifest was never finished. Files are read once, compared with the manifest, and only then
parsed, from the same bytes. Only the names that a checkpoint can have are followed, so a stranger's manifest cannot
point elsewhere.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from convolve.checkpoint.snapshot import FILES
from convolve.errors import CheckpointError
from convolve.run_files import MANIFEST_FILE, STATE_FILE

FORMAT = "convolve-checkpoint"
VERSION = 1
_MAX_MANIFEST = 2**16
_PIECE = 2**20
_REMEDY = "use another checkpoint, or `convolve restore RUN`, which takes the newest whole one"


@dataclass(frozen=True)
class FileEntry:
    """What one file must be."""

    sha256: str
    size: int


def encode_manifest(files: Mapping[str, bytes]) -> bytes:
    """The manifest of these files."""
    entries = {name: {"bytes": len(data), "sha256": _digest(data)} for name, data in files.items()}
    return _seal({"format": FORMAT, "version": VERSION, "files": entries})


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """The entries of a checkpoint's manifest by file name; a sha256 in it identifies the content of that part."""
    path = folder / MANIFEST_FILE
    raw = _read(path, None)
    try:
        content = json.loads(raw)
        del content["sha256"]
        sealed = _seal(content)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _damaged(path, "not a manifest") from None
    if sealed != raw:
        raise _damaged(path, "its own sha256 differs")
    return _parse(path, content)


def read_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Each file of a checkpoint with its bytes, after they were compared with the manifest."""
    for name, entry in read_manifest(folder).items():
        data = _read(folder / name, entry.size)
        _compare(folder / name, _digest(data), entry)
        yield name, data


def verify(folder: Path) -> None:
    """Raise CheckpointError unless every file of a checkpoint is there and whole; needs no memory for it."""
    for name, entry in read_manifest(folder).items():
        _compare(folder / name, _digest_file(folder / name, entry.size), entry)


def _compare(path: Path, found: str, entry: FileEntry) -> None:
    if found != entry.sha256:
        raise _damaged(path, f"sha256 differs from {MANIFEST_FILE}")


def _parse(path: Path, content: Mapping[str, Any]) -> dict[str, FileEntry]:
    version = content.get("version")
    if content.get("format") != FORMAT or version != VERSION:
        given = f"format {content.get('format')!r} version {version!r}"
        raise CheckpointError(
            f"{path}: {given}: this convolve reads {FORMAT!r} version {VERSION}; use the one that wrote it"
        )
    try:
        entries = {
            str(name): FileEntry(str(item["sha256"]), int(item["bytes"])) for name, item in content["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(path, "no list of files") from None
    foreign = sorted(set(entries) - set(FILES))
    if foreign:
        raise _damaged(path, f"names {foreign[0]!r}, which is no part of a checkpoint")
    if STATE_FILE not in entries:
        raise _damaged(path, f"does not name {STATE_FILE}")
    return entries


def _read(path: Path, size: int | None) -> bytes:
    """The bytes of a file; `size` is what the manifest says, None for the manifest itself."""
    with _reading(path, size) as file:
        return file.read()


def _digest_file(path: Path, size: int) -> str:
    """The same as `_digest` of its bytes, a piece at a time."""
    digest, piece = hashlib.sha256(), bytearray(_PIECE)
    with _reading(path, size) as file:
        while count := file.readinto(piece):
            digest.update(memoryview(piece)[:count])
    return digest.hexdigest()


@contextmanager
def _reading(path: Path, size: int | None) -> Iterator[FileIO]:
    """A file of the right size, to be read."""
    try:
        if not path.is_file():
            raise _damaged(path, "missing")
        found = path.stat().st_size
        if size is not None and found != size:
            raise _damaged(path, f"{found} bytes instead of {size}")
        if size is None and found > _MAX_MANIFEST:
            raise _damaged(path, f"{found} bytes are too many for a manifest")
        with path.open("rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); {_REMEDY}") from error


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged checkpoint ({what}); {_REMEDY}")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _seal(content: Mapping[str, Any]) -> bytes:
    return _canonical({**content, "sha256": _digest(_canonical(content))})


def _canonical(content: Mapping[str, Any]) -> bytes:
    """The one way to write a manifest, so that any other byte is damage."""
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
