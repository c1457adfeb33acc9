"""The samples in a WebDataset tar, found by its headers. Runs in a sandbox, so imports are few.

Members read: `jpg`, `jpeg`, `png` and other images, `cls` (the label as text) and `json` (a dict with `bbox`, and
`label` if there is no `cls`).
"""

import json
import math
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convolve.data.readers.locations import EXTENSIONS, SampleLocation, SkippedEntries
from convolve.directory import open_regular
from convolve.errors import DataError

_LARGEST_TEXT = 1 << 20


def locate_samples(path: Path, number: int, skipped: SkippedEntries | None = None) -> list[SampleLocation]:
    """Return the locations of the samples of one tar, which is file `number` of its index; count unused members."""
    samples: dict[str, SampleLocation] = {}
    skipped = SkippedEntries() if skipped is None else skipped
    try:
        with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for key, members in _group(archive, path, skipped):
                if key in samples:
                    raise _duplicate(path, key)
                samples[key] = _read_sample(archive, path, number, key, members)
                _count_unused(path, members, samples[key], skipped)
            _require_end(archive, path)
    except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: not a readable tar ({reason}); get an undamaged copy") from error
    return list(samples.values())


def _duplicate(path: Path, key: str) -> DataError:
    return DataError(f"{path}: two samples have the key {key}; give each sample of a tar its own name")


def _count_unused(
    path: Path, members: dict[str, tarfile.TarInfo], sample: SampleLocation, skipped: SkippedEntries
) -> None:
    for ending, member in members.items():
        if ending not in ("cls", "json") and member.offset_data != sample.offset:
            skipped.add("member of a sample that is not read", f"{path.name}: {member.name}")


def _require_end(archive: tarfile.TarFile, path: Path) -> None:
    """Check that a tar ends with zeros: `tarfile` silently treats damage after the first member as the end, too."""
    with path.open("rb") as file:
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise DataError(f"{path}: cut off or damaged at byte {archive.offset}; get an undamaged copy")


def _files(archive: tarfile.TarFile, path: Path, skipped: SkippedEntries) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """Yield the name and the data of each file in a tar; a hard link has the data of the earlier member it names."""
    size = path.stat().st_size
    files: dict[str, tarfile.TarInfo] = {}
    for member in archive:
        target = member
        if member.islnk():
            if member.linkname not in files:
                raise DataError(f"{path}: {member.name} links to {member.linkname}, which is not before it in the tar")
            target = files[member.linkname]
        elif not member.isreg():
            if not member.isdir():
                skipped.add("symbolic link or device in a tar", f"{path.name}: {member.name}")
            continue
        if target.issparse():
            raise DataError(f"{path}: member {member.name} is sparse; pack the tar without --sparse")
        if target.offset_data + target.size > size:
            raise DataError(f"{path}: member {member.name} is cut off; get an undamaged copy")
        files[member.name] = target
        yield member.name, target


def _group(
    archive: tarfile.TarFile, path: Path, skipped: SkippedEntries
) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    current: dict[str, tarfile.TarInfo] = {}
    key = ""
    for name, member in _files(archive, path, skipped):
        folder, _, base = name.rpartition("/")
        stem, _, ending = base.partition(".")
        if not stem:
            skipped.add("hidden file", f"{path.name}: {name}")
            continue
        sample = f"{folder}/{stem}" if folder else stem
        if current and sample != key:
            yield key, current
            current = {}
        key = sample
        if ending.lower() in current:
            raise _duplicate(path, key)
        current[ending.lower()] = member
    if current:
        yield key, current


def _read_sample(
    archive: tarfile.TarFile, path: Path, number: int, key: str, members: dict[str, tarfile.TarInfo]
) -> SampleLocation:
    image = next((member for ending, member in members.items() if f".{ending}" in EXTENSIONS), None)
    if image is None:
        raise DataError(f"{path}: sample {key}: no image among {', '.join(members)}; add a jpg, png or similar")
    metadata: Any = json.loads(_read_text(archive, members["json"])) if "json" in members else {}
    metadata = metadata if isinstance(metadata, dict) else {}
    text = _read_text(archive, members["cls"]) if "cls" in members else str(metadata.get("label", ""))
    try:
        label = int(text)
        boxes = _read_boxes(metadata.get("bbox"))
        if abs(label) >= 2**31 or not all(math.isfinite(side) for box in boxes for side in box):
            raise ValueError("too large")
    except (TypeError, ValueError, LookupError, OverflowError):
        raise DataError(f"{path}: sample {key}: label {text!r:.40} or its bbox is not a number") from None
    return SampleLocation(number, image.offset_data, image.size, label, key, boxes)


def _read_text(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    if member.size > _LARGEST_TEXT:
        raise ValueError(f"{member.name} has {member.size} bytes")
    stream = archive.extractfile(member)
    return "" if stream is None else stream.read().decode("utf-8")


def _read_boxes(bbox: Any) -> tuple[tuple[float, float, float, float], ...]:
    """Return one box of four numbers, or a list of them, as a tuple of boxes."""
    if not bbox:
        return ()
    boxes = bbox if isinstance(bbox[0], list) else [bbox]
    return tuple((float(a), float(b), float(c), float(d)) for a, b, c, d in boxes)
