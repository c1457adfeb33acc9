"""Single pictures for prediction: any common image file as uint8 pixels, and a digit in the form of MNIST."""

import io
import stat
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from convolve.data.dataset import Images
from convolve.errors import DataError

LARGEST_PICTURE = 64_000_000

_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
_LARGEST_PIXEL_BYTES = 16
_LUMA = np.array((299, 587, 114), np.int64)
_INK_BOX = 20 / 28  # MNIST keeps the ink in 20 of 28 pixels
_FAINTEST_INK = 0.3


def read_picture(path: Path, *, channels: int, largest: int = LARGEST_PICTURE) -> Images:
    """The picture in a file as [H, W, C], whatever its format and mode, upright, on white where it is transparent.

    Args:
        largest: most pixels that are accepted; checked in the header, before anything is decoded.
    """
    return decode_picture(_read_file(path, largest), path, channels=channels, largest=largest)


def decode_picture(data: bytes, path: Path, *, channels: int, largest: int = LARGEST_PICTURE) -> Images:
    """The picture in the bytes of a file, as `read_picture` gives it; `path` is only what messages call it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about odd metadata: the pixels count
        return decode_in_thread(data, path, channels=channels, largest=largest)


def decode_in_thread(
    data: bytes | memoryview, path: Path | str, *, channels: int, largest: int = LARGEST_PICTURE
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
        raise DataError(f"{path}: more than the {largest} pixels that are accepted; make it smaller") from error
    except UnidentifiedImageError as error:
        raise DataError(f"{path}: not an image of a known format ({', '.join(_FORMATS)})") from error
    except Exception as error:  # a decoder may raise anything at all on a broken file
        raise DataError(f"{path}: broken image ({' '.join(str(error).split())}); save it again") from error


def _read_file(path: Path, largest: int) -> bytes:
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise DataError(f"{path}: not a file; give an image file")
        if facts.st_size > largest * _LARGEST_PIXEL_BYTES:
            raise DataError(f"{path}: {facts.st_size} bytes, too large for {largest} pixels; make it smaller")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _check_pixels(picture: Image.Image, path: Path | str, largest: int) -> None:
    width, height = picture.size
    if width * height > largest:
        raise DataError(
            f"{path}: {width} x {height} is more than the {largest} pixels that are accepted; make it smaller"
        )


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


def fit_digit(image: Images, size: int, invert: bool | None) -> Images:
    """A picture [H, W, C] of one digit as [size, size, 1], light on dark, as MNIST prepares its digits.

    The paper becomes 0, the ink keeps its contrast to the paper and its proportions, fills 20/28 of the size and is
    centred by its centre of mass. A picture that already has the size and is light on dark is returned as it is.

    Args:
        invert: whether the ink is darker than the paper; None: found out from the border.
    """
    grey = _to_grey(image)
    dark_on_light = _is_dark_on_light(grey) if invert is None else invert
    if grey.shape == (size, size) and not dark_on_light:
        return grey[..., np.newaxis]
    ink = _lift_ink(255 - grey if dark_on_light else grey)
    return _place(_scale(_crop(ink), round(size * _INK_BOX)), size)[..., np.newaxis]


def _to_grey(image: Images) -> Images:
    if image.shape[2] == 1:
        return image[..., 0]
    return ((image.astype(np.int64) @ _LUMA + 500) // 1000).astype(np.uint8)


def _border(grey: Images) -> Images:
    return np.concatenate((grey[0], grey[-1], grey[1:-1, 0], grey[1:-1, -1]))


def _is_dark_on_light(grey: Images) -> bool:
    """Whether most of the border is on the brighter side of the best cut between the picture's two shades."""
    if grey.min() == grey.max():
        return bool(grey.flat[0] > 127)
    return float((_border(grey) > _find_cut(grey)).mean()) > 0.5


def _find_cut(grey: Images) -> int:
    """Otsu's threshold: the cut that separates two shades best."""
    counts = np.bincount(grey.reshape(-1), minlength=256).astype(np.float64)
    below, total = np.cumsum(counts), float(grey.size)
    moment = np.cumsum(counts * np.arange(256))
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (moment[-1] * below - moment * total) ** 2 / (below * (total - below))
    return int(np.argmax(np.nan_to_num(between, nan=0.0, posinf=0.0)))


def _lift_ink(grey: Images) -> Images:
    """Brightness above the paper, which is what most of the border shows."""
    paper = int(np.median(_border(grey)))
    return np.maximum(grey, paper) - np.uint8(paper)


def _crop(ink: Images) -> Images:
    """The box around the ink; paper grain, as seen at the border, does not count as ink."""
    faintest = min(2.0 * float(np.percentile(_border(ink), 95)), _FAINTEST_INK * float(ink.max()))
    rows, columns = np.nonzero(ink > faintest)
    if not len(rows):
        return ink
    return np.where(ink > faintest, ink, np.uint8(0))[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


def _scale(ink: Images, box: int) -> Images:
    """The ink with its longer side at `box` pixels and the brightest pixel as bright as before."""
    height, width = ink.shape
    longer = max(height, width)
    if longer == box:
        return ink
    sides = (max(round(width * box / longer), 1), max(round(height * box / longer), 1))
    small = np.asarray(Image.fromarray(ink).resize(sides, Image.Resampling.BICUBIC)).astype(np.float64)
    gain = float(ink.max()) / max(float(small.max()), 1.0)
    return np.clip(np.rint(small * gain), 0, 255).astype(np.uint8)


def _place(ink: Images, size: int) -> Images:
    """The ink on an empty square, its centre of mass in the middle as far as the edges allow."""
    height, width = ink.shape
    weight = ink.astype(np.float64)
    total = weight.sum()
    row, column = (
        (weight.sum(1) @ np.arange(height) / total, weight.sum(0) @ np.arange(width) / total)
        if total
        else ((height - 1) / 2, (width - 1) / 2)
    )
    top = int(np.clip(np.rint(size / 2 - row), 0, size - height))
    left = int(np.clip(np.rint(size / 2 - column), 0, size - width))
    canvas = np.zeros((size, size), np.uint8)
    canvas[top : top + height, left : left + width] = ink
    return canvas
