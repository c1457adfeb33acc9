"""`mnist.npz`, the layout Keras made common: x_train, y_train, x_test, y_test in one zip.

Every member's announced size is checked before a byte of it is unpacked, and nothing pickled is ever loaded.
"""

import math
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from convolve.data.dataset import Images, Labels
from convolve.data.idx import DEFAULT_LIMIT
from convolve.errors import DataError

MEMBERS = ("x_train", "y_train", "x_test", "y_test")

_LARGEST_HEADER = 4096


def read_npz(path: Path, *, limit: int = DEFAULT_LIMIT) -> tuple[Images, Labels, Images, Labels]:
    """Training images and labels, test images and labels; a member of more than `limit` bytes is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, about headers of odd age: what they say is checked here
        try:
            with zipfile.ZipFile(path) as archive:
                x_train, y_train, x_test, y_test = (_read_member(archive, path, name, limit) for name in MEMBERS)
        except DataError:
            raise
        except Exception as error:  # numpy parses headers as Python text, which can fail in any way
            told = " ".join(str(error).split())
            raise DataError(f"{path}: not a readable npz file ({told}); get an undamaged copy") from error
    return (
        _as_images(x_train, path, "x_train"),
        _as_labels(y_train, path, "y_train"),
        _as_images(x_test, path, "x_test"),
        _as_labels(y_test, path, "y_test"),
    )


def _read_member(archive: zipfile.ZipFile, path: Path, name: str, limit: int) -> npt.NDArray[Any]:
    entries = [entry for entry in archive.infolist() if entry.filename == f"{name}.npy"]
    if len(entries) != 1:
        held = ", ".join(sorted(archive.namelist())[:8]) or "nothing"
        raise DataError(f"{path}: must hold {name}.npy once, holds {held}; expected {', '.join(MEMBERS)}")
    size = entries[0].file_size
    if size > limit + _LARGEST_HEADER:
        raise DataError(f"{path}: {name} announces {size} bytes: more than the {limit} that are accepted")
    with archive.open(entries[0]) as stream:
        _check_header(stream, path, name, size)
    with archive.open(entries[0]) as stream:
        array: npt.NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
        if stream.read(1):
            raise DataError(f"{path}: {name} goes on after its array; get an undamaged copy")
    return array


def _check_header(stream: IO[bytes], path: Path, name: str, size: int) -> None:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream, max_header_size=_LARGEST_HEADER)
    if dtype.kind not in "ui":
        raise DataError(f"{path}: {name} holds {dtype}: must be whole numbers; get an undamaged copy")
    if stream.tell() + math.prod(shape) * dtype.itemsize != size:
        raise DataError(f"{path}: {name} announces shape {shape} of {dtype} in {size} bytes; get an undamaged copy")


def _as_images(values: npt.NDArray[Any], path: Path, name: str) -> Images:
    if values.dtype != np.uint8:
        raise DataError(f"{path}: {name} holds {values.dtype}: images must be uint8")
    return values


def _as_labels(values: npt.NDArray[Any], path: Path, name: str) -> Labels:
    if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise DataError(f"{path}: {name} holds a label of {values.max()}: no such class; get an undamaged copy")
    return values.astype(np.int64)
