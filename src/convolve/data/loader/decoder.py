"""Decode boxes of images for training: JPEG by libjpeg-turbo at the smallest scale that suffices, else by Pillow.

A JPEG can be decoded to 1/2, 1/4 or 1/8 of its sides for a fraction of the work. `Decoder` takes the smallest of these
scales at which the box still has at least as many pixels as the target. Other scales exist, but have no fast code and
cost more than they save. The fast DCT and chroma upsampling are used; they differ from the exact ones by a few levels.
An image that the cache does not keep is decoded only inside the box, many images in one native call.
"""

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import simplejpeg
from torch import Tensor

from convolve.data.dataset import Images
from convolve.data.image_io import MAX_PIXELS, Box, decode_image_in_thread, too_large_error
from convolve.errors import DataError
from convolve.kernels import jpeg_region
from convolve.kernels.build import Unavailable
from convolve.kernels.jpeg import Encoded, Jpeg
from convolve.kernels.jpeg_region import Crop, Region, decode_whole
from convolve.kernels.resize import ResizeJob, resize

if TYPE_CHECKING:
    from convolve.data.loader.decoding import EncodedImages


ChooseBox = Callable[[tuple[int, int]], Box]
_JPEG = b"\xff\xd8\xff"
_EXIF = b"Exif\0\0"
_EXIF_SEARCH_BYTES = 4096
_PLAIN_SPACES = ("YCbCr", "Gray", "RGB")
_SCRATCH_BYTES = 640 << 10  # fits the private cache of a core
_READ_BYTES = 4 << 20


class Cache:
    """Decoded images up to a number of bytes. The first ones stay, since every epoch uses each image once."""

    def __init__(self, limit: int) -> None:
        self._free_bytes = limit
        self._pixels: dict[tuple[int, int], Images] = {}
        self._sizes: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def size(self, row: int) -> tuple[int, int] | None:
        """Return the full size of a cached image."""
        return self._sizes.get(row)

    def get(self, row: int, scale: int) -> Images | None:
        """Return the image as decoded at this scale."""
        return self._pixels.get((row, scale))

    def has_space(self, count: int) -> bool:
        return count <= self._free_bytes

    def put(self, row: int, scale: int, pixels: Images, size: tuple[int, int]) -> None:
        """Add an image if there is space for it."""
        with self._lock:
            if pixels.nbytes <= self._free_bytes and (row, scale) not in self._pixels:
                self._free_bytes -= pixels.nbytes
                self._pixels[row, scale] = pixels
                self._sizes[row] = size


class Sample(NamedTuple):
    """An image to decode: the box that `choose_box` selects, given the image size, is resized to fill `target`."""

    row: int
    choose_box: ChooseBox
    target: Tensor
    flip: bool


class Decoder:
    """Decodes boxes of the images of one reader; safe to use from many threads.

    One native call for many images waits less often for the other threads than a call for each.
    """

    def __init__(self, reader: "EncodedImages", cache_bytes: int) -> None:
        self._reader = reader
        self._cache = Cache(cache_bytes)
        self._buffers = _ThreadBuffers()
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about odd metadata, which does not affect the pixels

    def decode(self, row: int, choose_box: ChooseBox, target: Tensor, *, flip: bool) -> None:
        """Resize a box of one image to fill `target` [H, W, 3]."""
        self._start(Sample(row, choose_box, target, flip), None)
        self._buffers.finish()

    def decode_all(self, samples: Sequence[Sample]) -> dict[int, DataError]:
        """Decode images, and return the errors of broken ones by their positions."""
        uncached = [sample.row for sample in samples if self._cache.size(sample.row) is None]
        jpegs = self._reader.read_jpegs(uncached, self._buffers.read_buffer)
        done, errors = self._decode_crops(samples, jpegs), dict[int, DataError]()
        for position, sample in enumerate(samples):
            if position not in done:
                try:
                    self._start(sample, jpegs.get(sample.row))
                except DataError as error:
                    errors[position] = error
        self._buffers.finish()
        return errors

    def _decode_crops(self, samples: Sequence[Sample], jpegs: Mapping[int, Jpeg]) -> set[int]:
        """Decode boxes of images natively, and return the positions of those for which that was possible."""
        native = jpeg_region.load()
        if isinstance(native, Unavailable):
            return set()
        crops = {}
        for position, sample in enumerate(samples):
            jpeg = jpegs.get(sample.row)
            if jpeg is not None and (crop := self._plan_crop(sample, jpeg)) is not None:
                crops[position] = crop
        memory = self._buffers.allocate(max((crop.region.buffer_bytes for crop in crops.values()), default=0))
        succeeded = native.decode_crops(list(crops.values()), memory)
        return {position for position, success in zip(crops, succeeded, strict=True) if success}

    def _plan_crop(self, sample: Sample, jpeg: Jpeg) -> Crop | None:
        """Return the part of an image to decode natively; None if it must be decoded in another way."""
        size, shape = jpeg.size, sample.target.shape
        if size[0] * size[1] > MAX_PIXELS or not jpeg_region.is_decodable(jpeg.data, size):
            return None
        box = sample.choose_box(size)
        region = _region(size, box, _scale(box, shape))
        if self._cache.has_space(region.height * region.width * 3):
            return None
        return Crop(jpeg.data, region, sample.target, sample.flip)

    def _start(self, sample: Sample, jpeg: Jpeg | None) -> None:
        """Decode an image; the target is filled when this thread finishes its resize jobs."""
        row, choose_box, target, flip = sample
        shape, size = target.shape, self._cache.size(row)
        if size is not None:
            box = choose_box(size)
            cached = self._cache.get(row, _scale(box, shape))
            if cached is not None:
                self._buffers.jobs.append(ResizeJob(crop(cached, size, box), target, flip))
                return
        part = self._read(row, choose_box, shape) if jpeg is None else self._decode_jpeg(row, jpeg, choose_box, shape)
        self._buffers.jobs.append(ResizeJob(part, target, flip))

    def _read(self, row: int, choose_box: ChooseBox, shape: Sequence[int]) -> Images:
        data = self._reader.read(row)
        if not isinstance(data, bytes):
            full = (data.shape[0], data.shape[1])
            return crop(data, full, choose_box(full))
        size = jpeg_size(data)
        if size is None:
            return self._decode_other(row, data, choose_box, shape)
        return self._decode_jpeg(row, Jpeg(data, size), choose_box, shape)

    def _decode_other(self, row: int, data: Encoded, choose_box: ChooseBox, shape: Sequence[int]) -> Images:
        pixels = decode_image_in_thread(data, self._reader.name(row), channels=3)
        full = (pixels.shape[0], pixels.shape[1])
        box = choose_box(full)
        self._cache.put(row, _scale(box, shape), pixels, full)
        return crop(pixels, full, box)

    def _decode_jpeg(self, row: int, jpeg: Jpeg, choose_box: ChooseBox, shape: Sequence[int]) -> Images:
        """Decode a box at the smallest scale; an image that the strict decoder rejects is left to Pillow."""
        data, size = jpeg
        if size[0] * size[1] > MAX_PIXELS:
            raise too_large_error(self._reader.name(row), (size[1], size[0]), MAX_PIXELS)
        box = choose_box(size)
        scale = _scale(box, shape)
        height, width = -(-size[0] // scale), -(-size[1] // scale)
        cached = self._cache.has_space(height * width * 3)
        if not cached and (part := self._decode_region(jpeg, scale, box)) is not None:
            return part
        try:
            pixels = decode_whole(data, (height, width), self._buffers.allocate(height * width * 3))
        except ValueError:
            return self._decode_other(row, data, choose_box, shape)
        if cached:
            self._cache.put(row, scale, pixels.copy(), size)
        return crop(pixels, size, box)

    def _decode_region(self, jpeg: Jpeg, scale: int, box: Box) -> Images | None:
        """Decode only the box; None if that is impossible."""
        native = jpeg_region.load()
        if isinstance(native, Unavailable) or not jpeg_region.is_decodable(jpeg.data, jpeg.size):
            return None
        region = _region(jpeg.size, box, scale)
        return native.decode(jpeg.data, region, self._buffers.allocate(region.buffer_bytes))


class _ThreadBuffers(threading.local):
    """State of one thread: images to be resized, and reused memory for files and pixels."""

    def __init__(self) -> None:
        self.read_buffer = np.empty(_READ_BYTES, np.uint8)
        self.jobs: list[ResizeJob] = []
        self._scratch = np.empty(_SCRATCH_BYTES, np.uint8)
        self._used = 0

    def allocate(self, count: int) -> Images:
        """Return memory that stays valid until the next `finish`."""
        if self._used + count > len(self._scratch):
            self.finish()
        if count > len(self._scratch):
            self._scratch = np.empty(count, np.uint8)
        self._used += count
        return self._scratch[self._used - count : self._used]

    def finish(self) -> None:
        """Run the pending resize jobs."""
        jobs, self.jobs, self._used = self.jobs, [], 0
        resize(jobs)


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return height and width of a JPEG that libjpeg-turbo decodes correctly; None for anything else.

    CMYK must be converted and EXIF data may rotate the image: Pillow does both.
    """
    if not data.startswith(_JPEG) or data.find(_EXIF, 0, _EXIF_SEARCH_BYTES) >= 0:
        return None
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return (height, width) if space in _PLAIN_SPACES and height and width else None


def _scale(box: Box, shape: Sequence[int]) -> int:
    """Return the largest of 1, 2, 4, 8 by which the box may shrink and still fill a target of this shape."""
    shrink = min(box[2] / shape[0], box[3] / shape[1])
    return next((scale for scale in (8, 4, 2) if shrink >= scale), 1)


def _region(size: tuple[int, int], box: Box, scale: int) -> Region:
    """Return a box, in coordinates of the full `size`, of an image that is decoded at 1 / scale."""
    height, width = -(-size[0] // scale), -(-size[1] // scale)
    return Region(height, width, scale, *(box if scale == 1 else _shrink(box, size, (height, width))))


def crop(pixels: Images, size: tuple[int, int], box: Box) -> Images:
    """Return a box, in coordinates of the full `size`, of pixels that may be decoded smaller."""
    top, left, rows, columns = box if pixels.shape[:2] == size else _shrink(box, size, pixels.shape)
    return pixels[top : top + rows, left : left + columns]


def _shrink(box: Box, size: tuple[int, int], shape: tuple[int, ...]) -> Box:
    down, across = shape[0] / size[0], shape[1] / size[1]
    top, left = (min(round(box[0] * down), shape[0] - 1), min(round(box[1] * across), shape[1] - 1))
    bottom = min(max(round((box[0] + box[2]) * down), top + 1), shape[0])
    right = min(max(round((box[1] + box[3]) * across), left + 1), shape[1])
    return top, left, bottom - top, right - left
