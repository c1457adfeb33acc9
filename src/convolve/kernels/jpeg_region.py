"""Decode boxes of JPEGs natively, with the libjpeg-turbo inside Pillow, and resize them in the same call.

simplejpeg has the fastest whole-image decoder, but no way to decode a part. libjpeg-turbo has, and Pillow's wheels
include it as a shared library. The rows above the box and the columns beside it are parsed, but not transformed and
converted, and the rows below are not read. The pixels are those that simplejpeg decodes with its fast transform and
chroma filter: this is compared on a probe image before the first use. Pillow itself uses the exact transform and the
smooth chroma filter, which change nothing at 1/8, below 1 without subsampled chroma, and at 1/4 for 4:2:0.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import PIL
import simplejpeg
from torch import Tensor

from convolve.kernels import build
from convolve.kernels.jpeg import Encoded
from convolve.kernels.resize import pack_axis

Images: TypeAlias = npt.NDArray[np.uint8]
PILLOW = Path(PIL.__file__).parent
SCALES = (1, 2, 4, 8)
MAX_EXTRA_COLUMNS = 32  # decoded beside the box, since blocks are decoded whole
_END_OF_IMAGE = b"\xff\xd9"
_CROP_FIELDS = 13  # of a crop in jpeg_region.c
_SMALLEST_SIDE = 8  # in smaller images, simplejpeg may choose another scale of the same size
_FUNCTIONS = (  # as in jpeg_region.c
    "jpeg_std_error",
    "jpeg_CreateDecompress",
    "jpeg_mem_src",
    "jpeg_read_header",
    "jpeg_start_decompress",
    "jpeg_crop_scanline",
    "jpeg_skip_scanlines",
    "jpeg_read_scanlines",
    "jpeg_abort_decompress",
    "jpeg_destroy_decompress",
)


class Region(NamedTuple):
    """A box of an image that is decoded at 1 / scale of its sides; all sizes are in scaled pixels."""

    height: int
    width: int
    scale: int
    top: int
    left: int
    rows: int
    columns: int

    @property
    def buffer_bytes(self) -> int:
        """Return the number of bytes that decoding needs."""
        return self.rows * min(self.width, self.columns + MAX_EXTRA_COLUMNS) * 3


class Crop(NamedTuple):
    """A region of an image to resize to the dense `target` [H, W, 3], optionally flipped horizontally."""

    data: Encoded
    region: Region
    target: Tensor
    flip: bool


Decode: TypeAlias = Callable[[Encoded, Region, Images], Images | None]
DecodeCrops: TypeAlias = Callable[[Sequence[Crop], Images], list[bool]]


class RegionDecoder(NamedTuple):
    """Native functions: the pixels of one region, and regions of many images in one call, resized."""

    decode: Decode
    decode_crops: DecodeCrops


def is_decodable(data: Encoded, size: Sequence[int]) -> bool:
    """Return whether parts of an image may be decoded: it must be complete, since nothing below the box is read."""
    return bytes(data[-2:]) == _END_OF_IMAGE and min(size) >= _SMALLEST_SIDE


@cache
def load(pillow: Path = PILLOW) -> RegionDecoder | build.Unavailable:
    """Load the native form, or return why it cannot be used: the library may be missing or compute other pixels."""
    decoder = open_decoder(pillow)
    if isinstance(decoder, build.Unavailable) or matches_simplejpeg(decoder.decode):
        return decoder
    return build.Unavailable("the libjpeg-turbo in Pillow computes other pixels than simplejpeg")


def open_decoder(pillow: Path = PILLOW) -> RegionDecoder | build.Unavailable:
    """Compile the native form and bind it to the library in this folder of Pillow."""
    library, path = build.load("jpeg_region.c"), find_libjpeg(pillow)
    if isinstance(library, build.Unavailable):
        return library
    if path is None:
        return build.Unavailable("this Pillow contains no libjpeg-turbo")
    try:
        return bind(library, ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        return build.Unavailable(" ".join(str(error).split()))


def bind(library: build.Library, libjpeg: ctypes.CDLL) -> RegionDecoder:
    """Return the decoder in a compiled library, which uses the functions of `libjpeg`."""
    addresses = [ctypes.cast(getattr(libjpeg, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    functions = (ctypes.c_void_p * len(addresses))(*addresses)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    call = library.function("convolve_decode_region", (pointer, pointer, number, pointer, pointer, number))
    call_crops = library.function("convolve_decode_crops", (pointer, pointer, ctypes.c_int, pointer, number))

    def decode(data: Encoded, region: Region, memory: Images) -> Images | None:
        """Return the pixels of the region, in `memory`; None if the image has an error above the end of the region."""
        source, part = np.frombuffer(data, np.uint8), (number * len(region))(*region)
        if call(functions, _address(source), len(source), part, _address(memory), len(memory)):
            return None
        columns, skipped = part[6], region.left - part[4]
        pixels = memory[: region.rows * columns * 3].reshape(region.rows, columns, 3)
        return pixels[:, skipped : skipped + region.columns]

    def decode_crops(crops: Sequence[Crop], memory: Images) -> list[bool]:
        """Fill the targets, using `memory`, and return for each whether that succeeded."""
        fields = array("q")
        plans: list[tuple[npt.NDArray[np.int32], int]] = []  # kept alive while native code reads them
        for data, region, target, flip in crops:
            rows, columns, _ = target.shape
            across, down = pack_axis(region.columns, columns, flip), pack_axis(region.rows, rows, False)
            plans += (across, down)
            source = np.frombuffer(data, np.uint8)
            fields.extend((_address(source), len(source), *region, across[1], down[1], target.data_ptr(), 0))
        call_crops(functions, fields.buffer_info()[0], len(crops), _address(memory), len(memory))
        return [not failed for failed in fields[_CROP_FIELDS - 1 :: _CROP_FIELDS]]

    return RegionDecoder(decode, decode_crops)


def _address(memory: Images) -> int:
    address: int = memory.__array_interface__["data"][0]
    return address


def find_libjpeg(pillow: Path) -> Path | None:
    """Return the library in the folder of Pillow as installed by its wheel for Linux or macOS."""
    return next((path for place in ("../pillow.libs", ".dylibs") for path in pillow.glob(f"{place}/libjpeg*")), None)


def matches_simplejpeg(decode: Decode) -> bool:
    """Compare parts of a probe image with the whole, at every scale."""
    rows, columns = np.mgrid[:90, :110]
    image = np.stack([rows * columns, 7 * rows + 3 * columns, rows**2 - columns], axis=2).astype(np.uint8)
    for sampling in ("420", "444"):
        data = simplejpeg.encode_jpeg(image, quality=80, colorsubsampling=sampling)
        for scale in SCALES:
            height, width = -(-90 // scale), -(-110 // scale)
            whole = decode_whole(data, (height, width), None)
            top, left = height // 3, width // 3
            region = Region(height, width, scale, top, left, height // 3, width // 2)
            part = decode(data, region, np.empty(region.buffer_bytes, np.uint8))
            if part is None or not np.array_equal(part, whole[top : top + height // 3, left : left + width // 2]):
                return False
    return True


def decode_whole(data: Encoded, size: tuple[int, int], memory: Images | None) -> Images:
    """Return a whole JPEG [H, W, 3], decoded at the smallest scale that reaches a size; ValueError if it is broken."""
    pixels: Images = simplejpeg.decode_jpeg(
        data,
        colorspace="RGB",
        fastdct=True,
        fastupsample=True,
        min_height=size[0],
        min_width=size[1],
        buffer=memory,
    )
    return pixels
