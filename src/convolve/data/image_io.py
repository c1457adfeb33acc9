"""Decode whole images exactly, with Pillow, for prediction. Imports no torch, so a sandbox starts quickly.

Images of more than three channels are npy files of bytes [H, W, C]; four channels may also be a file with transparency,
whose fourth channel is the opacity.
"""

import io
import stat
import struct
import warnings
import zlib
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from convolve.directory import read_regular
from convolve.errors import DataError, ImageTooLargeError

Images = npt.NDArray[np.uint8]
Box: TypeAlias = tuple[int, int, int, int]
MAX_PIXELS = 64_000_000
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_MAX_PIXEL_BYTES = 16
MAX_CHANNELS = 256
_NPY_MAGIC = b"\x93NUMPY"
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_PNG_CHUNK = struct.Struct(">I4s")
_PNG_CHECKSUM = struct.Struct(">I")
_PNG_START = _PNG_MAGIC + _PNG_CHUNK.pack(13, b"IHDR")
_PNG_HEADER = struct.Struct(">IIBBBBB")
_PLAIN_MODES = {(8, 0, 0, 0, 0): "L", (8, 2, 0, 0, 0): "RGB"}  # depth, color, compression, filter, interlacing
_PLAIN_CHUNKS = {b"cHRM": 32, b"gAMA": 4, b"pHYs": 9, b"sRGB": 1}  # sizes of those that affect neither pixels nor mode


def center_box(size: tuple[int, int], fraction: float) -> Box:
    """Return the centered square whose side is a fraction of the shorter side."""
    height, width = size
    side = max(1, round(min(height, width) * fraction))
    return (height - side) // 2, (width - side) // 2, side, side


def read_image(path: Path, *, channels: int, largest: int = MAX_PIXELS) -> Images:
    """Return the image in a file as [H, W, C], upright, with transparency on white, for any format and mode.

    Args:
        largest: most pixels that are accepted; checked in the header, before anything is decoded.
    """
    return decode_image(_read_file(path, largest), path, channels=channels, largest=largest)


def decode_image(data: bytes, path: Path | str, *, channels: int, largest: int = MAX_PIXELS) -> Images:
    """Return the image in the bytes of a file, like `read_image`; `path` only names it in messages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about odd metadata, which does not affect the pixels
        return decode_image_in_thread(data, path, channels=channels, largest=largest)


def decode_image_in_thread(
    data: bytes | memoryview, path: Path | str, *, channels: int, largest: int = MAX_PIXELS
) -> Images:
    """`decode_image` for threads, which must not change the process-wide warning filters."""
    try:
        if data[: len(_NPY_MAGIC)] == _NPY_MAGIC:
            return _decode_array(bytes(data), path, channels, largest)
        if channels in (1, 3) and (plain := _decode_plain_png(memoryview(data), largest)) is not None:
            return _to_pixels(plain, channels)
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_pixels(image, path, largest)
            if image.format == "PNG":
                _check_png(memoryview(data))
            image.load()  # an orientation may follow the pixels
            if image.info:
                ImageOps.exif_transpose(image, in_place=True)
            if channels not in (1, 3) and len(image.getbands()) != channels:
                found = len(image.getbands())
                raise DataError(f"{found} channels; the model takes {channels}, give them as npy", subject=path)
            return _to_pixels(image, channels)
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise too_large_error(path, None, largest) from error
    except UnidentifiedImageError as error:
        raise DataError(f"not an image of a known format ({', '.join(_FORMATS)})", subject=path) from error
    except Exception as error:  # a decoder may raise anything on a broken file
        raise DataError(f"broken image ({' '.join(str(error).split())}); save it again", subject=path) from error


def _read_file(path: Path, largest: int) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path}: not a file; give an image file")
        if status.st_size > largest * _MAX_PIXEL_BYTES:
            raise DataError(f"{path}: {status.st_size} bytes, too large for {largest} pixels; make it smaller")
        return read_regular(path)
    except OSError as error:
        raise DataError(f"cannot read ({error.strerror or error})", subject=path) from error


def _check_pixels(image: Image.Image, path: Path | str, largest: int) -> None:
    width, height = image.size
    if width * height > largest:
        raise too_large_error(path, (width, height), largest)


def too_large_error(path: Path | str, size: tuple[int, int] | None, largest: int) -> ImageTooLargeError:
    """Return the error for an image with too many pixels."""
    found = "" if size is None else f"{size[0]} x {size[1]} is "
    problem = f"{found}more than the {largest} pixels that are accepted; make it smaller"
    return ImageTooLargeError(problem, subject=path)


def _decode_array(data: bytes, path: Path | str, channels: int, largest: int) -> Images:
    """Return the pixels of an npy file; its header is checked before anything is allocated."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read_header(file)
    if dtype != np.uint8 or by_columns or len(shape) != 3 or 0 in shape:
        raise DataError(f"{dtype} {list(shape)}; give uint8 pixels [H, W, C] in C order", subject=path)
    if shape[2] != channels:
        raise DataError(f"{shape[2]} channels; the model takes {channels}", subject=path)
    if shape[0] * shape[1] > largest:
        raise too_large_error(path, (shape[1], shape[0]), largest)
    body = data[file.tell() :]
    if len(body) != shape[0] * shape[1] * shape[2]:
        raise DataError(f"{len(body)} bytes for an array of {list(shape)}; save it again", subject=path)
    return np.frombuffer(body, np.uint8).reshape(shape)


def _decode_plain_png(data: memoryview, largest: int) -> Image.Image | None:
    """Return the image of an intact PNG of 8-bit gray or RGB without transparency; None for any other file.

    It has the pixels of `Image.open`, which takes several times as long for a small image.
    """
    if data[: len(_PNG_START)] != _PNG_START or len(data) < len(_PNG_START) + _PNG_HEADER.size:
        return None
    width, height, *kind = _PNG_HEADER.unpack_from(data, len(_PNG_START))
    mode = _PLAIN_MODES.get(tuple(kind))
    if mode is None or not 0 < width * height <= min(largest, MAX_PIXELS):
        return None
    try:
        return Image.frombytes(mode, (width, height), _read_plain_chunks(data), "zip", mode, 0)
    except (ValueError, struct.error):  # the decoder for all files reports it
        return None


def _read_plain_chunks(data: memoryview) -> bytes:
    """Return the compressed pixels of a PNG. Raise ValueError if it is not intact or has chunks that need more care."""
    position, parts, name = len(_PNG_MAGIC), list[memoryview](), b"IHDR"
    while name != b"IEND":
        length, name = _PNG_CHUNK.unpack_from(data, position)
        end = position + _PNG_CHUNK.size + length
        if name == b"IDAT":
            parts.append(data[position + _PNG_CHUNK.size : end])
        elif position > len(_PNG_MAGIC) and name != b"IEND" and (parts or _PLAIN_CHUNKS.get(name) != length):
            raise ValueError("a chunk that may change the image")
        if name != b"IEND" and zlib.crc32(data[position + 4 : end]) != _PNG_CHECKSUM.unpack_from(data, end)[0]:
            raise ValueError("wrong checksum")
        position = end + _PNG_CHECKSUM.size
    return b"".join(parts)


def _check_png(data: memoryview) -> None:
    """Compare the checksums of a PNG up to its end; Pillow does so only for what is in front of the pixels."""
    position, kind = len(_PNG_MAGIC), b""
    try:
        while True:
            length, kind = _PNG_CHUNK.unpack_from(data, position)
            if kind == b"IEND":
                return
            end = position + _PNG_CHUNK.size + length
            if zlib.crc32(data[position + 4 : end]) != _PNG_CHECKSUM.unpack_from(data, end)[0]:
                raise ValueError(f"wrong checksum in {kind!r} of a PNG")
            position = end + _PNG_CHECKSUM.size
    except struct.error:
        raise ValueError("truncated PNG") from None


def _to_pixels(image: Image.Image, channels: int) -> Images:
    if channels not in (1, 3):
        pixels = np.array(image, np.uint8)
        return pixels.reshape(*pixels.shape[:2], channels)
    if image.mode.startswith("I") or image.mode == "F":
        image = Image.fromarray(_to_bytes(np.asarray(image), image.mode))
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    mode = "L" if channels == 1 else "RGB"
    pixels = np.array(image if image.mode == mode else image.convert(mode))
    return pixels.reshape(*pixels.shape[:2], channels)


def _to_bytes(values: npt.NDArray[np.generic], mode: str) -> Images:
    """Convert deep pixels to 8 bits: 16-bit ones by their range, others by the narrowest usual range that fits."""
    deep = values.astype(np.float64)
    if not np.isfinite(deep).all():
        raise ValueError("a pixel that is not a number")
    low, high = float(deep.min()), float(deep.max())
    ranges = {"I": (255.0, 65535.0), "F": (1.0, 255.0, 65535.0)}.get(mode, (65535.0,))
    top = next((top for top in ranges if low >= 0 and high <= top), None)
    if top is None:
        deep, top = deep - low, max(high - low, 1.0)
    return np.rint(deep * (255.0 / top)).astype(np.uint8)
