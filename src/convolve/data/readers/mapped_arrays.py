"""Arrays in a file that are mapped into memory instead of read, so processes of a host share one copy.

    magic line | length of the header, 8 bytes | header, JSON | arrays, each at a multiple of 64 bytes

The header has dtype, shape and offset of each array, a checksum of all arrays, and values of the caller.
"""

import json
import mmap
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from convolve.directory import open_regular

Arrays = dict[str, npt.NDArray[Any]]
_MAGIC = b"convolve arrays 1\n"
_ALIGNMENT = 64
_MAX_HEADER = 1 << 24
_DTYPES = ("|u1", "|b1", "<i4", "<i8", "<f4", "<f8")
_CHUNK = 1 << 20


def write_arrays(path: Path, values: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write arrays and values that JSON can express."""
    parts = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    places, checksum, end = {}, 0, 0
    for name, array in parts.items():
        places[name] = [array.dtype.str, list(array.shape), end]
        for block in (_bytes(array).data, _padding(array.nbytes)):
            checksum = zlib.crc32(block, checksum)
        end += array.nbytes + len(_padding(array.nbytes))
    header = json.dumps({"values": dict(values), "arrays": places, "checksum": checksum}).encode()
    start = _MAGIC + len(header).to_bytes(8, "little") + header
    with path.open("wb") as file:
        file.write(start + _padding(len(start)))
        for array in parts.values():
            file.write(_bytes(array).data)
            file.write(_padding(array.nbytes))


def _bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def _padding(size: int) -> bytes:
    return bytes(-size % _ALIGNMENT)


def map_arrays(path: Path) -> tuple[dict[str, Any], Arrays]:
    """Return the values and the read-only arrays of a file. Raises ValueError and others if it is damaged."""
    with open_regular(path) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("not a file of arrays")
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER:
            raise ValueError("the header is too long")
        header = json.loads(file.read(size))
        start = len(_MAGIC) + 8 + size
        start += len(_padding(start))
        if _checksum(file, start) != header["checksum"]:
            raise ValueError("the checksum is wrong")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    arrays = {name: _view(mapped, start, *place) for name, place in header["arrays"].items()}
    return header["values"], arrays


def _checksum(file: BinaryIO, start: int) -> int:
    """Return the checksum from a position on, read in pieces, which do not stay in memory."""
    file.seek(start)
    checksum = 0
    while block := file.read(_CHUNK):
        checksum = zlib.crc32(block, checksum)
    return checksum


def _view(mapped: mmap.mmap, start: int, dtype: str, shape: list[int], offset: int) -> npt.NDArray[Any]:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r:.20}")
    if not all(isinstance(value, int) and 0 <= value < 1 << 48 for value in (offset, *shape)):
        raise ValueError("a shape or an offset is no size")
    count = 1
    for length in shape:
        count *= length
    if count == 0:
        return np.empty(shape, dtype)
    if start + offset + count * np.dtype(dtype).itemsize > len(mapped):
        raise ValueError("an array is longer than the file")
    return np.frombuffer(mapped, dtype, count, start + offset).reshape(shape)
