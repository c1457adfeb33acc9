"""CIFAR-10 and CIFAR-100 in a folder, in the binary version (fixed records) or the python version (see `pickled.py`).

A binary record is one label byte, or a coarse and a fine one, of which the fine one counts, and 3,072 bytes of pixels:
the red, then the green, then the blue plane, each 32 rows of 32.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from convolve.data.catalogue import Entry
from convolve.data.dataset import Images, Labels, Split, make_split
from convolve.data.pickled import read_fields
from convolve.errors import DataError

_PIXELS = 3 * 32 * 32


def read_binary(folder: Path, entry: Entry) -> tuple[Split, Split] | None:
    """The splits of the binary version; None where no file of it is there."""
    names = [file.name for file in entry.files]
    return _read(folder, names, entry, lambda path: _read_records(path, entry))


def read_python(folder: Path, entry: Entry) -> tuple[Split, Split] | None:
    """The splits of the python version; None where no file of it is there."""
    names = [file.name.removesuffix(".bin") for file in entry.files]
    return _read(folder, names, entry, lambda path: _read_pickled(path, entry))


def _read(folder: Path, names: list[str], entry: Entry, read: Any) -> tuple[Split, Split] | None:
    missing = [name for name in names if not (folder / name).is_file()]
    if len(missing) == len(names):
        return None
    if missing:
        raise DataError(f"{folder}: {', '.join(missing)} missing; put all files of {entry.name} there")
    parts = [read(folder / name) for name in names]
    return _join(parts[:-1], folder, entry), _join(parts[-1:], folder, entry)


def _join(parts: list[tuple[Images, Labels]], folder: Path, entry: Entry) -> Split:
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    planes = torch.from_numpy(images).view(-1, 3, 32, 32).permute(0, 2, 3, 1)
    return make_split(planes.contiguous().numpy(), labels, classes=len(entry.classes), where=str(folder))


def _read_records(path: Path, entry: Entry) -> tuple[Images, Labels]:
    labels = 1 if len(entry.classes) <= 10 else 2
    size = path.stat().st_size
    if size > entry.limit or size % (labels + _PIXELS) or not size:
        raise DataError(f"{path}: {size} bytes: must be records of {labels + _PIXELS} bytes; get an undamaged copy")
    records = np.fromfile(path, np.uint8).reshape(-1, labels + _PIXELS)
    return records[:, labels:], records[:, labels - 1].astype(np.int64)


def _read_pickled(path: Path, entry: Entry) -> tuple[Images, Labels]:
    fields = read_fields(path, limit=entry.limit)
    labels = fields.get(b"labels") if len(entry.classes) <= 10 else fields.get(b"fine_labels")
    data = fields.get(b"data")
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != _PIXELS:
        raise DataError(f"{path}: no array of images in it; use the binary version of the data")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise DataError(f"{path}: no list of labels in it; use the binary version of the data")
    return data, np.array(labels, np.int64)
