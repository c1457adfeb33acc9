"""IDX files, raw or gzip, told apart by content: a big-endian header (two zero bytes, type, number of dimensions, one
u32 per dimension) and the values.

Nothing is allocated before the announced size has been compared with what the file can hold, and a gzip stream is read
for exactly the announced bytes and must end there, so that a decompression bomb costs nothing.
"""

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from convolve.data.dataset import Images, Labels
from convolve.errors import DataError

DEFAULT_LIMIT = 1 << 30

_GZIP_MAGIC = b"\x1f\x8b"
_DEFLATE_RATIO = 1032  # the most that deflate can expand
_UNSIGNED_BYTE = 8
_CHUNK = 1 << 20


def read_images(path: Path, *, limit: int = DEFAULT_LIMIT) -> Images:
    """The images of one IDX file as [N, H, W] (or [N, H, W, C]); more than `limit` bytes are refused."""
    return _read(path, (3, 4), limit)


def read_labels(path: Path, *, limit: int = DEFAULT_LIMIT) -> Labels:
    """The labels of one IDX file as int64."""
    return _read(path, (1,), limit).astype(np.int64)


def pack_idx(values: Images | Labels) -> bytes:
    """The contents of an IDX file that holds these values as unsigned bytes."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, _UNSIGNED_BYTE, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def _read(path: Path, dimensions: tuple[int, ...], limit: int) -> Images:
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file
            shape = _read_header(stream, path, dimensions)
            _check_size(path, shape, os.fstat(file.fileno()).st_size, packed, limit)
            return _read_body(stream, path, shape)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); get an undamaged copy") from error


def _take(stream: BinaryIO, count: int, path: Path, offset: int) -> bytes:
    """Up to `count` bytes; fewer only at the end of the stream."""
    try:
        return stream.read(count)
    except EOFError:
        return b""
    except (zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: gzip damage after byte {offset} ({error}); get an undamaged copy") from error


def _read_header(stream: BinaryIO, path: Path, dimensions: tuple[int, ...]) -> tuple[int, ...]:
    magic = _take(stream, 4, path, 0)
    allowed = " or ".join(f"0000{_UNSIGNED_BYTE:02x}{count:02x}" for count in dimensions)
    if len(magic) < 4 or magic[:3] != bytes((0, 0, _UNSIGNED_BYTE)) or magic[3] not in dimensions:
        raise DataError(
            f"{path}: starts with {magic.hex() or 'nothing'}: an IDX file of this kind starts with {allowed}"
        )
    sizes = _take(stream, 4 * magic[3], path, 4)
    if len(sizes) < 4 * magic[3]:
        raise DataError(f"{path}: ends at byte {4 + len(sizes)}, within its header; get an undamaged copy")
    return struct.unpack(f">{magic[3]}I", sizes)


def _check_size(path: Path, shape: tuple[int, ...], on_disk: int, packed: bool, limit: int) -> None:
    header, body = 4 + 4 * len(shape), math.prod(shape)
    told = f"{path}: announces {' x '.join(map(str, shape))} = {body} bytes"
    if body > limit:
        raise DataError(f"{told}: more than the {limit} that are accepted; this is not the file it claims to be")
    if packed and header + body > on_disk * _DEFLATE_RATIO:
        raise DataError(f"{told}: more than its {on_disk} bytes of gzip can hold; get an undamaged copy")
    if not packed and header + body != on_disk:
        kind = "truncated" if header + body > on_disk else "too long"
        raise DataError(f"{told} but has {on_disk - header}: {kind}; get an undamaged copy")


def _read_body(stream: BinaryIO, path: Path, shape: tuple[int, ...]) -> Images:
    header, body = 4 + 4 * len(shape), math.prod(shape)
    values = np.empty(body, np.uint8)
    done = 0
    while done < body:
        chunk = _take(stream, min(_CHUNK, body - done), path, header + done)
        if not chunk:
            raise DataError(f"{path}: truncated at byte {header + done} of {header + body}; get an undamaged copy")
        values[done : done + len(chunk)] = np.frombuffer(chunk, np.uint8)
        done += len(chunk)
    _demand_end(stream, path, header + body)
    return values.reshape(shape)


def _demand_end(stream: BinaryIO, path: Path, offset: int) -> None:
    try:
        extra = stream.read(1)
    except EOFError as error:
        raise DataError(f"{path}: the gzip stream is cut after byte {offset}; get an undamaged copy") from error
    except (zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: gzip damage ({error}); get an undamaged copy") from error
    if extra:
        raise DataError(f"{path}: goes on after the announced {offset} bytes; get an undamaged copy")
