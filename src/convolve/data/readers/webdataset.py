"""WebDataset tars: the members of one sample are adjacent and have the same name up to its first dot.

Members read: `jpg`, `jpeg`, `png` and other images, `cls` (the label as text) and `json` (a dict with `bbox`, and
`label` if there is no `cls`). Nothing is unpacked: the index has the offset of each image.
"""

import json
import math
import re
import tarfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from convolve.data.dataset import Skipped
from convolve.data.readers.image_folder import EXTENSIONS
from convolve.data.readers.index import Index, SampleLocation, SkippedEntries, index_shards
from convolve.directory import open_regular, read_regular
from convolve.download import Progress
from convolve.errors import DataError

METADATA = "metadata.json"
_LARGEST_TEXT = 1 << 20
_SHARD_NUMBER = re.compile(r"-\d+$")
_TRAIN, _TEST = ("train",), ("validation", "val", "valid", "test")


def find_shards(root: Path) -> tuple[list[Path], list[Path]] | None:
    """Return the tars of the two splits; tars with other names only are all for training."""
    tars = sorted(root.glob("*.tar"))
    if not tars:
        return None
    train, test = ([tar for tar in tars if _split_name(tar) in names] for names in (_TRAIN, _TEST))
    return (train, test) if train and test else (tars, [])


def unused_shards(root: Path, used: Iterable[Path]) -> tuple[Skipped, ...]:
    """Return the tars that belong to neither split."""
    unused = sorted(set(root.glob("*.tar")) - set(used))
    return (("tar of no split", len(unused), unused[0].name),) if unused else ()


def _split_name(path: Path) -> str:
    return _SHARD_NUMBER.sub("", path.stem)


def read_metadata(root: Path) -> dict[str, Any]:
    """Return the contents of `metadata.json`; empty if there is none."""
    path = root / METADATA
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > 64 * _LARGEST_TEXT:
            raise ValueError("it is too large")
        metadata = json.loads(read_regular(path))
        if not isinstance(metadata, dict):
            raise ValueError("it must be an object")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot read ({error}); get an undamaged copy") from error
    return metadata


def index_tars(root: Path, shards: list[Path], split: str, progress: Progress) -> Index:
    """Index the samples of one split in the order of the shards."""
    skipped = SkippedEntries()
    return index_shards(root, shards, f"tar {split}", partial(locate_samples, skipped=skipped), progress, skipped)


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


def require_length(root: Path, split: str, count: int) -> None:
    """Raise DataError if the metadata announce another number of samples: a shard is missing, or one too many."""
    announced = read_metadata(root).get(f"{split}_length")
    if isinstance(announced, int) and announced != count:
        raise DataError(f"{root}: {count} samples of {split}, {METADATA} announces {announced}; get a complete copy")


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
