"""Read the class numbers of ImageNet's development kit from `meta.mat`, a MATLAB 5 file.

The file is a header of 128 bytes and elements: type and size as 32-bit integers, then the data, padded to 8 bytes; an
element of at most 4 bytes has its size in the upper half of the type, and its data at once. Type 15 is a compressed
element, 14 a matrix: flags, dimensions, name, and for a struct the field names and one matrix for each field of each
entry, entry after entry. The variable `synsets` is a struct with the fields ILSVRC2012_ID and WNID, among others.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from convolve.directory import read_regular
from convolve.errors import DataError

_HEADER_BYTES = 128
_MAX_BYTES = 64 << 20
_COMPRESSED, _MATRIX = 15, 14
_STRUCT, _CHAR = 2, 4
_INTEGERS = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "f", 9: "d", 12: "q", 13: "Q", 16: "B", 17: "H"}


@dataclass(frozen=True)
class _Matrix:
    kind: int
    count: int
    parts: list[tuple[int, bytes]]


def read_synsets(path: Path) -> dict[int, str]:
    """Return the WordNet id of each class number."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("too large")
        data = read_regular(path)
        for kind, body in _elements(data[_HEADER_BYTES:]):
            if kind == _COMPRESSED:
                inflated = zlib.decompressobj().decompress(body, _MAX_BYTES)
                kind, body = next(_elements(inflated))
            if kind == _MATRIX:
                return _read_struct(_read_matrix(body))
        raise ValueError("no variable")
    except OSError as error:
        raise DataError(f"{path}: cannot read ({error.strerror or error}); copy it from the development kit") from None
    except (ValueError, KeyError, IndexError, StopIteration, OverflowError, struct.error, zlib.error) as error:
        raise DataError(f"{path}: not the meta.mat of ImageNet ({error}); get an undamaged copy") from None


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<II", data, at)
        if kind >> 16:
            yield kind & 0xFFFF, data[at + 4 : at + 4 + (kind >> 16)]
            at += 8
            continue
        if at + 8 + size > len(data):
            raise ValueError("truncated")
        yield kind, data[at + 8 : at + 8 + size]
        at += 8 + (size if kind == _COMPRESSED else -(-size // 8) * 8)


def _read_matrix(body: bytes) -> _Matrix:
    flags, dimensions, _, *parts = _elements(body)
    count = 1
    for size in struct.unpack(f"<{len(dimensions[1]) // 4}i", dimensions[1]):
        count *= size
    return _Matrix(flags[1][0], count, parts)


def _read_struct(matrix: _Matrix) -> dict[int, str]:
    if matrix.kind != _STRUCT:
        raise ValueError("no struct")
    width = struct.unpack("<i", matrix.parts[0][1])[0]
    packed = matrix.parts[1][1]
    names = [packed[at : at + width].split(b"\0")[0].decode() for at in range(0, len(packed), width)]
    number, text = names.index("ILSVRC2012_ID"), names.index("WNID")
    cells = [body for kind, body in matrix.parts[2:] if kind == _MATRIX]
    rows = [cells[at : at + len(names)] for at in range(0, len(cells), len(names))]
    return {int(_values(row[number])[0]): "".join(chr(int(value)) for value in _values(row[text])) for row in rows}


def _values(body: bytes) -> tuple[float, ...]:
    kind, data = _read_matrix(body).parts[0]
    letter = _INTEGERS[kind]
    return struct.unpack(f"<{len(data) // struct.calcsize(letter)}{letter}", data)
