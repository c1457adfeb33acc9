"""From an encoded picture to the pixels of one box of it: JPEG by libjpeg-turbo at the smallest scale that is enough,
everything else by Pillow.

A JPEG can be decoded to 1/2, 1/4 or 1/8 of its sides for a fraction of the work. The smallest of these at which the box
still has at least as many pixels as are wanted is taken. Scales between them exist, but have no quick code and cost
more than they save. The quick transform and chroma filter are used; they differ from the exact ones by a few levels.

Single pictures for prediction: any common image file as uint8 pixels, and a digit in the form of MNIST.
"""

import io
import stat
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from convolve.data.dataset import Images
from convolve.data.transforms.augment import Box
from convolve.errors import DataError, ImageTooLargeError
from convolve.kernels.jpeg import Encoded, Jpeg
from convolve.kernels.resize import ResizeJob, resize

Decoded = Images
ChooseBox = Callable[[tuple[int, int]], Box]
_JPEG = b"\xff\xd8\xff"
_EXIF = b"Exif\0\0"
_EXIF_SEARCH_BYTES = 4096
_PLAIN_SPACES = ("YCbCr", "Gray", "RGB")
_SCRATCH_BYTES = 640 << 10  # a core's own cache holds it
_READ_BYTES = 4 << 20


class Reader(Protocol):
    """Pictures by number."""

    def name(self, row: int) -> str:
        """How a message names a picture."""

    def read(self, row: int) -> bytes | Images:
        """The picture itself: encoded, or pixels [H, W, 3]."""

    def read_jpegs(self, rows: Sequence[int], memory: Images) -> dict[int, Jpeg]:
        """Those of the pictures that can be read into `memory` at once."""


class Cache:
    """Decoded pictures up to a number of bytes; the first ones stay, since every epoch asks for all of them once."""

    def __init__(self, limit: int) -> None:
        self._room = limit
        self._kept: dict[tuple[int, int], tuple[Images, tuple[int, int]]] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def size(self, row: int) -> tuple[int, int] | None:
        """The full size of a picture that was kept."""
        return self._sizes.get(row)

    def get(self, row: int, scale: int) -> Images | None:
        """The picture as it was decoded at this scale."""
        found = self._kept.get((row, scale))
        return None if found is None else found[0]

    def wants(self, count: int) -> bool:
        """Whether there is room for so many bytes."""
        return count <= self._room

    def put(self, row: int, scale: int, pixels: Images, size: tuple[int, int]) -> None:
        """Keep a picture while there is room."""
        with self._lock:
            if pixels.nbytes <= self._room and (row, scale) not in self._kept:
                self._room -= pixels.nbytes
                self._kept[row, scale] = (pixels, size)
                self._sizes[row] = size


class Decoder:
    """Decodes boxes of pictures of one source; safe to use from many threads.

    Several pictures can be read ahead and begun before they are finished together: a thread that calls native code
    once for many pictures waits less often for the others.
    """

    def __init__(self, source: Reader, cache_bytes: int) -> None:
        self._source = source
        self._cache = Cache(cache_bytes)
        self._own = _ThreadBuffers()
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about odd metadata: the pixels count

    def decode(self, row: int, choose: ChooseBox, target: Tensor, *, flip: bool) -> None:
        """Put the box that `choose` picks (from the picture's size) into `target` [H, W, 3], resized to fill it."""
        self.begin(row, choose, target, flip=flip)
        self.finish()

    def read_ahead(self, rows: Sequence[int]) -> None:
        """Read together what this thread is about to begin; a picture that was not read ahead is read by itself."""
        wanted = [row for row in rows if self._cache.size(row) is None]
        self._own.jpegs = self._source.read_jpegs(wanted, self._own.inbox)

    def begin(self, row: int, choose: ChooseBox, target: Tensor, *, flip: bool) -> None:
        """The first half of `decode`: the target is filled when this thread calls `finish`."""
        wanted = target.shape
        known = self._cache.size(row)
        if known is not None:
            box = choose(known)
            kept = self._cache.get(row, _scale(box, wanted))
            if kept is not None:
                self._own.jobs.append(ResizeJob(crop(kept, known, box), target, flip))
                return
        jpeg = self._own.jpegs.pop(row, None)
        part = self._read(row, choose, wanted) if jpeg is None else self._decode_jpeg(row, jpeg, choose, wanted)
        self._own.jobs.append(ResizeJob(part, target, flip))

    def finish(self) -> None:
        """Fill the targets of all that this thread has begun."""
        self._own.finish()

    def _read(self, row: int, choose: ChooseBox, wanted: Sequence[int]) -> Images:
        data = self._source.read(row)
        if not isinstance(data, bytes):
            return _whole_image(data, choose)
        size = jpeg_size(data)
        if size is None:
            return self._decode_other(row, data, choose, wanted)
        return self._decode_jpeg(row, Jpeg(data, size), choose, wanted)

    def _decode_other(self, row: int, data: Encoded, choose: ChooseBox, wanted: Sequence[int]) -> Images:
        pixels = decode_image_in_thread(data, self._source.name(row), channels=3)
        full = (pixels.shape[0], pixels.shape[1])
        box = choose(full)
        self._cache.put(row, _scale(box, wanted), pixels, full)
        return crop(pixels, full, box)

    def _decode_jpeg(self, row: int, jpeg: Jpeg, choose: ChooseBox, wanted: Sequence[int]) -> Images:
        """A part of the picture at the smallest scale; where the strict decoder objects, Pillow judges."""
        data, size = jpeg
        if size[0] * size[1] > MAX_PIXELS:
            raise _too_large(self._source.name(row), (size[1], size[0]), MAX_PIXELS)
        box = choose(size)
        scale = _scale(box, wanted)
        height, width = -(-size[0] // scale), -(-size[1] // scale)
        try:
            pixels: Images = simplejpeg.decode_jpeg(
                data,
                colorspace="RGB",
                fastdct=True,
                fastupsample=True,
                min_height=height,
                min_width=width,
                buffer=self._own.room(height * width * 3),
            )
        except ValueError:
            return self._decode_other(row, data, choose, wanted)
        if self._cache.wants(pixels.nbytes):
            self._cache.put(row, scale, pixels.copy(), size)
        return crop(pixels, size, box)


class _ThreadBuffers(threading.local):
    """What each thread has for itself: pictures that wait to be decoded or resized, and memory for them that is used
    again."""

    def __init__(self) -> None:
        self.jpegs: dict[int, Jpeg] = {}
        self.inbox = np.empty(_READ_BYTES, np.uint8)
        self.jobs: list[ResizeJob] = []
        self._memory = np.empty(_SCRATCH_BYTES, np.uint8)
        self._used = 0

    def room(self, count: int) -> Images:
        """Memory that stays as it is until the next `finish`."""
        if self._used + count > len(self._memory):
            self.finish()
        if count > len(self._memory):
            self._memory = np.empty(count, np.uint8)
        self._used += count
        return self._memory[self._used - count : self._used]

    def finish(self) -> None:
        """Resize what waits."""
        jobs, self.jobs, self._used = self.jobs, [], 0
        resize(jobs)


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG that libjpeg-turbo decodes as it should look; None for anything else.

    CMYK has to be converted and a camera's note may turn the picture, which Pillow does.
    """
    if not data.startswith(_JPEG) or data.find(_EXIF, 0, _EXIF_SEARCH_BYTES) >= 0:
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (height, width) if space in _PLAIN_SPACES and height and width else None


def _scale(box: Box, wanted: Sequence[int]) -> int:
    """The largest of 1, 2, 4, 8 by which the box may shrink and still fill the wanted size."""
    shrink = min(box[2] / wanted[0], box[3] / wanted[1])
    return next((scale for scale in (8, 4, 2) if shrink >= scale), 1) if shrink >= 2 else 1


def _whole_image(pixels: Images, choose: ChooseBox) -> Images:
    size = (pixels.shape[0], pixels.shape[1])
    return crop(pixels, size, choose(size))


def crop(pixels: Images, size: tuple[int, int], box: Box) -> Images:
    """A box, given in coordinates of the full `size`, of perhaps smaller pixels."""
    top, left, rows, columns = box if pixels.shape[:2] == size else _shrink(box, size, pixels.shape)
    return pixels[top : top + rows, left : left + columns]


def _shrink(box: Box, size: tuple[int, int], shape: tuple[int, ...]) -> Box:
    """The same box in a picture that was decoded smaller."""
    down, across = shape[0] / size[0], shape[1] / size[1]
    top, left = (min(round(box[0] * down), shape[0] - 1), min(round(box[1] * across), shape[1] - 1))
    bottom = min(max(round((box[0] + box[2]) * down), top + 1), shape[0])
    right = min(max(round((box[1] + box[3]) * across), left + 1), shape[1])
    return top, left, bottom - top, right - left


MAX_PIXELS = 64_000_000
_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_MAX_PIXEL_BYTES = 16


def read_image(path: Path, *, channels: int, largest: int = MAX_PIXELS) -> Images:
    """The picture in a file as [H, W, C], whatever its format and mode, upright, on white where it is transparent.

    Args:
        largest: most pixels that are accepted; checked in the header, before anything is decoded.
    """
    return decode_image(_read_file(path, largest), path, channels=channels, largest=largest)


def decode_image(data: bytes, path: Path, *, channels: int, largest: int = MAX_PIXELS) -> Images:
    """The picture in the bytes of a file, as `read_picture` gives it; `path` is only what messages call it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about odd metadata: the pixels count
        return decode_image_in_thread(data, path, channels=channels, largest=largest)


def decode_image_in_thread(
    data: bytes | memoryview, path: Path | str, *, channels: int, largest: int = MAX_PIXELS
) -> Images:
    """`decode_picture` for threads, which must not touch the warning filters that all of them share."""
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as picture:
            _check_pixels(picture, path, largest)
            _check_png(picture, data)
            return _to_pixels(ImageOps.exif_transpose(picture), channels)
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        raise _too_large(path, None, largest) from error
    except UnidentifiedImageError as error:
        raise DataError(f"not an image of a known format ({', '.join(_FORMATS)})", subject=path) from error
    except Exception as error:  # a decoder may raise anything at all on a broken file
        raise DataError(f"broken image ({' '.join(str(error).split())}); save it again", subject=path) from error


def _read_file(path: Path, largest: int) -> bytes:
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise DataError(f"{path}: not a file; give an image file")
        if facts.st_size > largest * _MAX_PIXEL_BYTES:
            raise DataError(f"{path}: {facts.st_size} bytes, too large for {largest} pixels; make it smaller")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _check_pixels(picture: Image.Image, path: Path | str, largest: int) -> None:
    width, height = picture.size
    if width * height > largest:
        raise _too_large(path, (width, height), largest)


def _too_large(path: Path | str, size: tuple[int, int] | None, largest: int) -> ImageTooLargeError:
    found = "" if size is None else f"{size[0]} x {size[1]} is "
    problem = f"{found}more than the {largest} pixels that are accepted; make it smaller"
    return ImageTooLargeError(problem, subject=path)


def _check_png(picture: Image.Image, data: bytes | memoryview) -> None:
    """Pillow compares the checksums of a PNG only when asked to."""
    if picture.format == "PNG":
        with Image.open(io.BytesIO(data), formats=("PNG",)) as again:
            again.verify()


def _to_pixels(picture: Image.Image, channels: int) -> Images:
    if picture.mode.startswith("I") or picture.mode == "F":
        picture = Image.fromarray(_to_bytes(np.asarray(picture), picture.mode))
    elif picture.has_transparency_data:
        white = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    pixels = np.array(picture.convert("L" if channels == 1 else "RGB"))
    return pixels.reshape(*pixels.shape[:2], channels)


def _to_bytes(values: npt.NDArray[np.generic], mode: str) -> Images:
    """Deep pixels as 8 bits: 16-bit ones by their range; others by the narrowest usual range that holds them."""
    deep = values.astype(np.float64)
    if not np.isfinite(deep).all():
        raise ValueError("a pixel that is not a number")
    low, high = float(deep.min()), float(deep.max())
    ranges = {"I": (255.0, 65535.0), "F": (1.0, 255.0, 65535.0)}.get(mode, (65535.0,))
    top = next((top for top in ranges if low >= 0 and high <= top), None)
    if top is None:
        deep, top = deep - low, max(high - low, 1.0)
    return np.rint(deep * (255.0 / top)).astype(np.uint8)
