"""From an encoded picture to the pixels of one box of it: JPEG by libjpeg-turbo at the smallest scale that is enough,
everything else by Pillow.

A JPEG can be decoded to 1/2, 1/4 or 1/8 of its sides for a fraction of the work. The smallest of these at which the box
still has at least as many pixels as are wanted is taken. Scales between them exist, but have no quick code and cost
more than they save. The quick transform and chroma filter are used; they differ from the exact ones by a few levels.
"""

import threading
import warnings
from collections.abc import Callable
from typing import Protocol

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from convolve.data.cropping import Box
from convolve.data.dataset import Images
from convolve.data.pictures import LARGEST_PICTURE, decode_in_thread
from convolve.errors import DataError

Decoded = Images
Choose = Callable[[tuple[int, int]], Box]

_JPEG = b"\xff\xd8\xff"
_EXIF = b"Exif\0\0"
_EXIF_WITHIN = 4096
_PLAIN_SPACES = ("YCbCr", "Gray", "RGB")
_resize = torch.ops.aten._upsample_bilinear2d_aa.out


class Readable(Protocol):
    """Pictures by number."""

    def name(self, row: int) -> str:
        """How a message names a picture."""

    def read(self, row: int) -> bytes | Images:
        """The picture itself: encoded, or pixels [H, W, 3]."""


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
    """Decodes boxes of pictures of one source; safe to use from many threads."""

    def __init__(self, source: Readable, cache_bytes: int) -> None:
        self._source = source
        self._cache = Cache(cache_bytes)
        self._own = threading.local()
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about odd metadata: the pixels count

    def decode(self, row: int, choose: Choose, target: Tensor, *, flip: bool) -> None:
        """Put the box that `choose` picks (from the picture's size) into `target` [H, W, 3], resized to fill it."""
        known = self._cache.size(row)
        if known is not None:
            box = choose(known)
            kept = self._cache.get(row, _scale(box, target))
            if kept is not None:
                place(kept, known, box, target, flip)
                return
        data = self._source.read(row)
        if not isinstance(data, bytes):
            size = (data.shape[0], data.shape[1])
            place(data, size, choose(size), target, flip)
            return
        self._decode(row, data, choose, target, flip)

    def _decode(self, row: int, data: bytes, choose: Choose, target: Tensor, flip: bool) -> None:
        name = self._source.name
        size = jpeg_size(data)
        if size is None:
            pixels = decode_in_thread(data, name(row), channels=3)
            full = (pixels.shape[0], pixels.shape[1])
            box = choose(full)
            self._cache.put(row, _scale(box, target), pixels, full)
            place(pixels, full, box, target, flip)
            return
        if size[0] * size[1] > LARGEST_PICTURE:
            raise DataError(f"{name(row)}: {size[1]} x {size[0]} is more than the {LARGEST_PICTURE} pixels accepted")
        box = choose(size)
        scale = _scale(box, target)
        pixels = self._decode_jpeg(data, size, scale, row)
        if self._cache.wants(pixels.nbytes):
            self._cache.put(row, scale, pixels.copy(), size)
        place(pixels, size, box, target, flip)

    def _decode_jpeg(self, data: bytes, size: tuple[int, int], scale: int, row: int) -> Images:
        """The picture at 1/scale of its sides; where the strict decoder objects, Pillow judges."""
        height, width = -(-size[0] // scale), -(-size[1] // scale)
        try:
            pixels: Images = simplejpeg.decode_jpeg(
                data,
                colorspace="RGB",
                fastdct=True,
                fastupsample=True,
                min_height=height,
                min_width=width,
                buffer=self._scratch(height * width * 3),
            )
            return pixels
        except ValueError:
            return decode_in_thread(data, self._source.name(row), channels=3)

    def _scratch(self, count: int) -> Images:
        """Memory of this thread's own, used again for every picture."""
        held: Images | None = getattr(self._own, "memory", None)
        if held is None or len(held) < count:
            held = np.empty(count, np.uint8)
            self._own.memory = held
        return held


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG that libjpeg-turbo decodes as it should look; None for anything else.

    CMYK has to be converted and a camera's note may turn the picture, which Pillow does.
    """
    if data[:3] != _JPEG or _EXIF in data[:_EXIF_WITHIN]:
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (height, width) if space in _PLAIN_SPACES and height and width else None


def _scale(box: Box, target: Tensor) -> int:
    """The largest of 1, 2, 4, 8 by which the box may shrink and still fill the target."""
    shrink = min(box[2] / target.shape[0], box[3] / target.shape[1])
    return next((scale for scale in (8, 4, 2) if shrink >= scale), 1)


def place(pixels: Images, size: tuple[int, int], box: Box, target: Tensor, flip: bool) -> None:
    """Resize a box, given in coordinates of the full `size`, of perhaps smaller pixels into the target."""
    down, across = pixels.shape[0] / size[0], pixels.shape[1] / size[1]
    top, left = (min(round(box[0] * down), pixels.shape[0] - 1), min(round(box[1] * across), pixels.shape[1] - 1))
    bottom = min(max(round((box[0] + box[2]) * down), top + 1), pixels.shape[0])
    right = min(max(round((box[1] + box[3]) * across), left + 1), pixels.shape[1])
    part = torch.from_numpy(pixels)[top:bottom, left:right]
    part = part.flip(1) if flip else part
    height, width = target.shape[:2]
    if part.shape == target.shape:
        target.copy_(part)
        return
    _resize(part.permute(2, 0, 1)[None], [height, width], False, None, None, out=target.permute(2, 0, 1)[None])
