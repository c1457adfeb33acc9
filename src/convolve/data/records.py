"""Photographs in TFRecord files: ImageNet's layout (`train-00000-of-01024`, labels from 1) and that of TFDS
(`name-train.tfrecord-00000-of-00064`, labels from 0). Every CRC is checked when the index is made.
"""

import re
from pathlib import Path

from convolve.data.dataset import Progress
from convolve.data.index import Index, Place, index_shards
from convolve.data.tfrecord import Feature, parse_example, read_records
from convolve.errors import DataError

_IMAGENET = re.compile(r"^(train|validation)-(\d{5})-of-(\d{5})$")
_TFDS = re.compile(r"^(.+)-(train|validation|test)\.tfrecord-(\d{5})-of-(\d{5})$")
_LARGEST_SHARD = 1 << 33
_CORNERS = ("xmin", "ymin", "xmax", "ymax")

Shards = tuple[list[Path], list[Path]]


def find_imagenet(root: Path) -> Shards | None:
    """The shards of ImageNet's two splits."""
    found = {name: _matching(root, _IMAGENET, name) for name in ("train", "validation")}
    return _pair(root, found["train"], found["validation"])


def find_tfds(root: Path) -> Shards | None:
    """The shards of a TFDS folder, of which `validation` is tested on, or `test` where there is none."""
    names = {match[1] for path in root.iterdir() if (match := _TFDS.match(path.name))}
    if len(names) > 1:
        raise DataError(f"{root}: holds {', '.join(sorted(names))}; give the folder of one data set")
    splits = {split: _matching(root, _TFDS, split) for split in ("train", "validation", "test")}
    return _pair(root, splits["train"], splits["validation"] or splits["test"])


def _matching(root: Path, pattern: "re.Pattern[str]", split: str) -> list[Path]:
    """The shards of one split in order; a gap in the numbering is an error."""
    found = sorted(path for path in root.iterdir() if (match := pattern.match(path.name)) and split in match.groups())
    parts = [pattern.match(path.name) for path in found]
    numbers = [(int(match.groups()[-2]), int(match.groups()[-1])) for match in parts if match]
    total = numbers[0][1] if numbers else 0
    if numbers != [(number, total) for number in range(total)]:
        raise DataError(f"{root}: {len(found)} files of {split}, {total} belong together; put all of them there")
    return found


def _pair(root: Path, train: list[Path], test: list[Path]) -> Shards | None:
    if not train and not test:
        return None
    if not train or not test:
        raise DataError(f"{root}: only one of the splits is there; put train and validation there")
    return train, test


def index_records(root: Path, shards: list[Path], what: str, progress: Progress) -> Index:
    """The samples of one split in the order of the shards."""
    return index_shards(root, shards, f"tfrecord {what}", read_places, progress)


def read_places(path: Path, number: int) -> list[Place]:
    """The samples of one file, every CRC checked."""
    places = []
    at = 0
    for position, record in enumerate(read_records(path, limit=_LARGEST_SHARD)):
        at += 12  # length and its CRC
        places.append(_read_place(path, number, position, at, record))
        at += len(record) + 4
    if not places:
        raise DataError(f"{path}: no record in it; get an undamaged copy")
    return places


def _read_place(path: Path, number: int, position: int, start: int, record: memoryview) -> Place:
    where = f"{path}: record {position}"
    try:
        features = parse_example(record)
    except ValueError as error:
        raise DataError(f"{where}: not a tf.train.Example ({error}); get an undamaged copy") from error
    from_one = "image/encoded" in features
    encoded = features.get("image/encoded") or features.get("image")
    label = features.get("image/class/label" if from_one else "label")
    if not encoded or not label or not isinstance(encoded[0], bytes) or not isinstance(label[0], int):
        needed = "image/encoded and image/class/label, or image and label"
        raise DataError(f"{where}: has features {', '.join(sorted(features))}: needs {needed}")
    # The same bytes at an earlier place of the record would be the same picture, so the first match is right.
    offset = start + bytes(record).index(encoded[0])
    return Place(number, offset, len(encoded[0]), label[0] - from_one, f"{position}", _read_boxes(features))


def _read_boxes(features: dict[str, Feature]) -> tuple[tuple[float, float, float, float], ...]:
    corners = [features.get(f"image/object/bbox/{corner}", []) for corner in _CORNERS]
    if len({len(values) for values in corners}) != 1 or not all(isinstance(v, float) for one in corners for v in one):
        return ()
    return tuple((float(a), float(b), float(c), float(d)) for a, b, c, d in zip(*corners, strict=True))
