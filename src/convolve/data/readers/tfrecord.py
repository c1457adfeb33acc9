"""TFRecord files of images, read without TensorFlow (`records.py`).

Small images are read into memory. Photographs are indexed, in ImageNet's layout (`train-00000-of-01024`, labels from 1)
or that of TFDS (`name-train.tfrecord-00000-of-00064`, labels from 0); every CRC is checked when the index is built.
"""

import io
import re
import struct
import warnings
from pathlib import Path

import numpy as np
from PIL import Image

from convolve.data.dataset import Images, Labels
from convolve.data.loader.in_memory import MAX_SIDE
from convolve.data.readers.index import Index, index_shards
from convolve.data.readers.mnist import DEFAULT_LIMIT
from convolve.data.readers.records import damage, parse_example, read_records
from convolve.download import Progress
from convolve.errors import DataError

_REPORT_EVERY = 2000


def read_examples(path: Path, progress: Progress, *, limit: int = DEFAULT_LIMIT) -> tuple[Images, Labels]:
    """Return the PNG images [N, H, W, C] and labels of one file with the features `image` and `label`.

    Args:
        limit: largest file, and largest decoded size, that is accepted, in bytes.
    """
    records = read_records(path, limit=limit)
    images: Images | None = None
    labels = np.empty(len(records), np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about odd files; the checks here are stricter
        for number, record in enumerate(records):
            image, labels[number] = _read_example(record, path, number)
            if images is None:
                images = _allocate(len(records), image, path, limit)
            if image.shape != images.shape[1:]:
                raise damage(path, number, f"image of {image.shape}, the first one has {images.shape[1:]}")
            images[number] = image
            if number % _REPORT_EVERY == 0:
                progress(f"decode {path.name}", number, len(records))
    if images is None:
        raise DataError(f"{path}: contains no record; get a complete copy")
    progress(f"decode {path.name}", len(records), len(records))
    return images, labels


def _read_example(record: memoryview, path: Path, number: int) -> tuple[Images, int]:
    try:
        features = parse_example(record)
    except ValueError as error:
        raise damage(path, number, f"not a tf.train.Example ({error})") from error
    encoded, label = features.get("image"), features.get("label")
    if not encoded or not label or not isinstance(encoded[0], bytes) or not isinstance(label[0], int):
        raise damage(path, number, f"has features {sorted(features)}, needs bytes 'image' and int64 'label'")
    return _decode_png(encoded[0], path, number), label[0]


def _decode_png(encoded: bytes, path: Path, number: int) -> Images:
    try:
        with Image.open(io.BytesIO(encoded), formats=["PNG"]) as image:
            if max(image.size) > MAX_SIDE:
                raise damage(path, number, f"image of {image.size}, sides must be at most {MAX_SIDE}")
            if image.mode not in ("L", "RGB"):
                raise damage(path, number, f"image of mode {image.mode}, must be gray or RGB")
            pixels = np.asarray(image)
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise damage(path, number, f"its image is not a readable PNG ({error})") from error
    return pixels.reshape(*pixels.shape[:2], -1)


def _allocate(count: int, image: Images, path: Path, limit: int) -> Images:
    if count * image.size > limit:
        raise DataError(f"{path}: {count} images of {image.shape} need more than the {limit} bytes that are accepted")
    return np.empty((count, *image.shape), np.uint8)


_IMAGENET = re.compile(r"^(train|validation)-(\d{5})-of-(\d{5})$")
_TFDS = re.compile(r"^(.+)-(train|validation|test)\.tfrecord-(\d{5})-of-(\d{5})$")
Shards = tuple[list[Path], list[Path]]


def find_imagenet(root: Path) -> Shards | None:
    """Return the shards of ImageNet's two splits, or None if there are none."""
    return _pair(root, *(_matching(root, _IMAGENET, split) for split in ("train", "validation")))


def find_tfds(root: Path) -> Shards | None:
    """Return the training shards of a TFDS folder and those of `validation`, or `test` if there is no `validation`."""
    names = {match[1] for path in root.iterdir() if (match := _TFDS.match(path.name))}
    if len(names) > 1:
        raise DataError(f"{root}: contains {', '.join(sorted(names))}; give the folder of one data set")
    splits = {split: _matching(root, _TFDS, split) for split in ("train", "validation", "test")}
    return _pair(root, splits["train"], splits["validation"] or splits["test"])


def _matching(root: Path, pattern: "re.Pattern[str]", split: str) -> list[Path]:
    """Return the shards of one split in order; a gap in the numbering is an error."""
    paths = sorted(path for path in root.iterdir() if (match := pattern.match(path.name)) and split in match.groups())
    matches = [pattern.match(path.name) for path in paths]
    numbers = [(int(match.groups()[-2]), int(match.groups()[-1])) for match in matches if match]
    total = numbers[0][1] if numbers else 0
    if numbers != [(number, total) for number in range(total)]:
        raise DataError(f"{root}: {len(paths)} files of {split}, {total} belong together; add the missing ones")
    return paths


def _pair(root: Path, train: list[Path], test: list[Path]) -> Shards | None:
    if not train and not test:
        return None
    if not train or not test:
        raise DataError(f"{root}: contains only one split; add the other of train and validation")
    return train, test


def index_records(root: Path, shards: list[Path], split: str, progress: Progress) -> Index:
    """Index the samples of one split in the order of the shards."""
    return index_shards(root, shards, f"tfrecord {split}", "tfrecord", progress)
