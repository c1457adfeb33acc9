"""The files of MNIST: IDX, raw or gzip, and the `mnist.npz` of Keras.

IDX is a big-endian header (two zero bytes, type, number of dimensions, one u32 per dimension) and the values; gzip is
detected by content. Nothing is allocated before the announced size has been compared with what the file can contain. A
gzip stream is read for exactly the announced bytes and must end there, so a decompression bomb has no effect.

The npz file is a zip of x_train, y_train, x_test and y_test. The announced size of each member is checked before it is
unpacked, and pickles are never loaded.
"""

import gzip
import math
import os
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from convolve.data.dataset import Images, Labels
from convolve.directory import open_regular
from convolve.errors import DataError

DEFAULT_LIMIT = 1 << 30
_GZIP_MAGIC = b"\x1f\x8b"
_DEFLATE_RATIO = 1032  # the most that deflate can expand
_UNSIGNED_BYTE = 8
_CHUNK = 1 << 20


def read_images(path: Path, *, limit: int = DEFAULT_LIMIT) -> Images:
    """Return the images of one IDX file as [N, H, W] (or [N, H, W, C]); more than `limit` bytes are an error."""
    return _read(path, (3, 4), limit)


def read_labels(path: Path, *, limit: int = DEFAULT_LIMIT) -> Labels:
    """Return the labels of one IDX file as int64."""
    return _read(path, (1,), limit).astype(np.int64)


def pack_idx(values: Images | Labels) -> bytes:
    """Return the contents of an IDX file of these values as unsigned bytes."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, _UNSIGNED_BYTE, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def _read(path: Path, dimensions: tuple[int, ...], limit: int) -> Images:
    try:
        with open_regular(path) as file:
            packed = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=file)) if packed else file
            shape = _read_header(stream, path, dimensions)
            _check_size(path, shape, os.fstat(file.fileno()).st_size, packed, limit)
            return _read_body(stream, path, shape)
    except OSError as error:
        raise DataError(f"{path}: cannot read ({error.strerror or error}); get an undamaged copy") from error


def _take(stream: BinaryIO, count: int, path: Path, offset: int) -> bytes:
    """Return `count` bytes, or fewer at the end of the stream."""
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
    announced = f"{path}: announces {' x '.join(map(str, shape))} = {body} bytes"
    # Without images the other sizes must still be possible ones.
    if math.prod(max(1, size) for size in shape) > limit:
        raise DataError(f"{announced}: more than the {limit} that are accepted; this is not the file it claims to be")
    if packed and header + body > on_disk * _DEFLATE_RATIO:
        raise DataError(f"{announced}: more than its {on_disk} bytes of gzip can contain; get an undamaged copy")
    if not packed and header + body != on_disk:
        kind = "truncated" if header + body > on_disk else "too long"
        raise DataError(f"{announced} but has {on_disk - header}: {kind}; get an undamaged copy")


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
    _require_end(stream, path, header + body)
    return values.reshape(shape)


def _require_end(stream: BinaryIO, path: Path, offset: int) -> None:
    try:
        extra = stream.read(1)
    except EOFError as error:
        raise DataError(f"{path}: the gzip stream is cut after byte {offset}; get an undamaged copy") from error
    except (zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: gzip damage ({error}); get an undamaged copy") from error
    if extra:
        raise DataError(f"{path}: continues after the announced {offset} bytes; get an undamaged copy")


MEMBERS = ("x_train", "y_train", "x_test", "y_test")
_LARGEST_HEADER = 4096


def read_npz(path: Path, *, limit: int = DEFAULT_LIMIT) -> tuple[Images, Labels, Images, Labels]:
    """Return training images and labels, test images and labels; a member of more than `limit` bytes is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, about old headers; their values are checked here
        try:
            with open_regular(path) as file, zipfile.ZipFile(file) as archive:
                x_train, y_train, x_test, y_test = (_read_member(archive, path, name, limit) for name in MEMBERS)
        except DataError:
            raise
        except Exception as error:  # numpy parses headers as Python text, which can fail in any way
            reason = " ".join(str(error).split())
            raise DataError(f"{path}: not a readable npz file ({reason}); get an undamaged copy") from error
    return (
        _as_images(x_train, path, "x_train"),
        _as_labels(y_train, path, "y_train"),
        _as_images(x_test, path, "x_test"),
        _as_labels(y_test, path, "y_test"),
    )


def _read_member(archive: zipfile.ZipFile, path: Path, name: str, limit: int) -> npt.NDArray[Any]:
    entries = [entry for entry in archive.infolist() if entry.filename == f"{name}.npy"]
    if len(entries) != 1:
        contents = ", ".join(sorted(archive.namelist())[:8]) or "nothing"
        raise DataError(f"{path}: must contain {name}.npy once, contains {contents}; expected {', '.join(MEMBERS)}")
    size = entries[0].file_size
    if size > limit + _LARGEST_HEADER:
        raise DataError(f"{path}: {name} announces {size} bytes: more than the {limit} that are accepted")
    with archive.open(entries[0]) as stream:
        _check_header(stream, path, name, size)
    with archive.open(entries[0]) as stream:
        array: npt.NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
        if stream.read(1):
            raise DataError(f"{path}: {name} continues after its array; get an undamaged copy")
    return array


def _check_header(stream: IO[bytes], path: Path, name: str, size: int) -> None:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream, max_header_size=_LARGEST_HEADER)
    if dtype.kind not in "ui":
        raise DataError(f"{path}: {name} contains {dtype}: must be integers; get an undamaged copy")
    if stream.tell() + math.prod(shape) * dtype.itemsize != size:
        raise DataError(f"{path}: {name} announces shape {shape} of {dtype} in {size} bytes; get an undamaged copy")


def _as_images(values: npt.NDArray[Any], path: Path, name: str) -> Images:
    if values.dtype != np.uint8:
        raise DataError(f"{path}: {name} contains {values.dtype}: images must be uint8")
    return values


def _as_labels(values: npt.NDArray[Any], path: Path, name: str) -> Labels:
    if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise DataError(f"{path}: {name} contains a label of {values.max()}: no such class; get an undamaged copy")
    return values.astype(np.int64)
