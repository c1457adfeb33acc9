import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from convolve.data.image_io import read_image
from convolve.data.lookup import load_digits
from convolve.errors import DataError, ImageTooLargeError
from convolve.inference.preprocess import fit_digit

RED_GREEN = np.zeros((6, 8, 3), np.uint8)
RED_GREEN[:, :4, 0] = RED_GREEN[:, 4:, 1] = 255


def save(image: Image.Image, path: Path, kind: str = "PNG", **options: object) -> Path:
    image.save(path, kind, **options)
    return path


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM", "JPEG"])
def test_every_format_is_recognized_by_content_under_a_wrong_name(tmp_path: Path, kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    path = save(Image.fromarray(RED_GREEN), tmp_path / "image.txt", kind, **options)
    pixels = read_image(path, channels=3)
    assert pixels.shape == (6, 8, 3)
    assert np.abs(pixels.astype(int) - RED_GREEN).max() <= (70 if kind == "JPEG" else 0)


def test_color_becomes_gray_and_gray_becomes_color(tmp_path: Path) -> None:
    color = save(Image.fromarray(RED_GREEN), tmp_path / "color")
    gray = save(Image.fromarray(RED_GREEN[..., 0]), tmp_path / "gray")
    assert read_image(color, channels=1)[0, :, 0].tolist() == [76] * 4 + [150] * 4
    assert np.array_equal(read_image(gray, channels=3), np.repeat(RED_GREEN[..., :1], 3, 2))


def test_black_and_white_bits_become_0_and_255(tmp_path: Path) -> None:
    path = save(Image.fromarray(RED_GREEN[..., 0] > 0), tmp_path / "bits")
    assert read_image(path, channels=1)[0, :, 0].tolist() == [255] * 4 + [0] * 4


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(1, 1), (37, 23), (300, 200)])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_plain_png_has_the_pixels_that_pillow_reads(
    tmp_path: Path, mode: str, size: tuple[int, int], channels: int
) -> None:
    """Smooth and noisy rows use all filters of PNG, and the large images have several chunks of pixels."""
    rng, (width, height) = np.random.default_rng(0), size
    noise = rng.integers(0, 256, (height, width, 3), np.uint8)
    smooth = np.broadcast_to(np.add.outer(np.arange(height), np.arange(width))[..., None] % 256, noise.shape)
    image = Image.fromarray(np.where(np.arange(height)[:, None, None] % 3 == 0, noise, smooth).astype(np.uint8))
    for options in ({}, {"dpi": (300, 300)}, {"compress_level": 0}, {"gamma": 1}, {"icc_profile": b"none"}):
        path = save(image.convert(mode), tmp_path / "plain", **options)
        with Image.open(path) as expected:
            pixels = np.asarray(expected.convert("L" if channels == 1 else "RGB")).reshape(height, width, channels)
        assert np.array_equal(read_image(path, channels=channels), pixels)


@pytest.mark.parametrize(
    ("options", "plain"),
    [({}, True), ({"dpi": (72, 72)}, True), ({"transparency": (0, 0, 0)}, False), ({"bits": 4}, False)],
    ids=str,
)
def test_only_a_plain_png_is_decoded_without_opening_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, object], plain: bool
) -> None:
    image = Image.fromarray(RED_GREEN)
    path = save(image.quantize() if "bits" in options else image, tmp_path / "image", **options)
    opened = []
    original = Image.open
    monkeypatch.setattr(Image, "open", lambda *args, **options: opened.append(args) or original(*args, **options))
    read_image(path, channels=3)
    assert bool(opened) is not plain


@pytest.mark.parametrize("mode", ["LA", "RGBA", "PA", "P"])
def test_transparency_is_laid_on_white(tmp_path: Path, mode: str) -> None:
    rgba = Image.new("RGBA", (4, 3), (0, 0, 0, 0))
    rgba.putpixel((1, 1), (0, 0, 0, 255))
    kind = "TIFF" if mode == "PA" else "PNG"
    if mode == "P":
        image = Image.new("P", (4, 3), 1)
        image.putpalette([0, 0, 0, 90, 90, 90])
        image.putpixel((1, 1), 0)
        path = save(image, tmp_path / "clear", kind, transparency=1)
    else:
        path = save(rgba if mode != "LA" else rgba.convert("LA"), tmp_path / "clear", kind)
    expected = np.full((3, 4), 255)
    expected[1, 1] = 0
    assert np.array_equal(read_image(path, channels=1)[..., 0], expected)


def test_half_transparent_black_on_white_is_gray(tmp_path: Path) -> None:
    path = save(Image.new("RGBA", (2, 2), (0, 0, 0, 128)), tmp_path / "half")
    assert read_image(path, channels=1)[0, 0, 0] == 127


def test_sixteen_bits_become_eight(tmp_path: Path) -> None:
    deep = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)
    expected = np.arange(256).reshape(16, 16)
    for kind in ("PNG", "TIFF"):
        path = save(Image.fromarray(deep), tmp_path / kind, kind)
        assert np.array_equal(read_image(path, channels=1)[..., 0], expected)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 255]], np.int32), [0, 255]),
        (np.array([[0, 65535]], np.int32), [0, 255]),
        (np.array([[-1000, 0, 1000]], np.int32), [0, 128, 255]),
        (np.array([[0, 0.5, 1]], np.float32), [0, 128, 255]),
        (np.array([[0, 100, 200]], np.float32), [0, 100, 200]),
        (np.array([[7.5, 7.5]], np.float32), [8, 8]),
    ],
)
def test_deep_pixels_take_the_narrowest_usual_range(tmp_path: Path, values: np.ndarray, expected: list[int]) -> None:
    path = save(Image.fromarray(values), tmp_path / "deep", "TIFF")
    assert read_image(path, channels=1)[0, :, 0].tolist() == expected


def test_a_pixel_that_is_not_a_number_is_rejected(tmp_path: Path) -> None:
    path = save(Image.fromarray(np.array([[0, np.nan]], np.float32)), tmp_path / "deep", "TIFF")
    with pytest.raises(DataError, match="deep: broken image"):
        read_image(path, channels=1)


def test_print_colors_become_screen_colors(tmp_path: Path) -> None:
    path = save(Image.new("CMYK", (8, 8), (0, 0, 0, 255)), tmp_path / "print", "JPEG")
    assert read_image(path, channels=3).max() <= 2


@pytest.mark.parametrize(("tag", "turns"), [(3, 2), (6, 3), (8, 1)])
def test_a_camera_that_was_turned_is_turned_back(tmp_path: Path, tag: int, turns: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = tag
    path = save(Image.fromarray(RED_GREEN), tmp_path / "turned", exif=exif)
    assert np.array_equal(read_image(path, channels=3), np.rot90(RED_GREEN, turns))


def test_too_many_pixels_are_rejected_from_the_header(tmp_path: Path) -> None:
    path = save(Image.new("1", (9000, 9000)), tmp_path / "huge")
    with pytest.raises(ImageTooLargeError, match="huge: 9000 x 9000 is more than the 64000000 pixels"):
        read_image(path, channels=1)


def test_an_image_far_beyond_all_limits_is_rejected(tmp_path: Path) -> None:
    head = b"IHDR" + struct.pack(">IIBBBBB", 40_000, 40_000, 8, 0, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    (tmp_path / "bomb").write_bytes(png + struct.pack(">I", 100) + b"IDAT" + bytes(104))
    with pytest.raises(ImageTooLargeError, match="bomb: more than the 64000000 pixels"):
        read_image(tmp_path / "bomb", channels=1)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_truncated_image_is_named(tmp_path: Path, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    whole = io.BytesIO()
    Image.fromarray(noise).save(whole, kind)
    (tmp_path / "cut").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    with pytest.raises(DataError, match=r"cut: (broken image|not an image)"):
        read_image(tmp_path / "cut", channels=3)


def test_any_flipped_bit_in_a_png_is_an_error_or_harmless(tmp_path: Path) -> None:
    whole = io.BytesIO()
    Image.fromarray(RED_GREEN).save(whole, "PNG")
    for place in range(len(whole.getvalue())):
        damaged = bytearray(whole.getvalue())
        damaged[place] ^= 4
        (tmp_path / "flipped").write_bytes(damaged)
        try:
            assert np.array_equal(read_image(tmp_path / "flipped", channels=3), RED_GREEN)
        except DataError as error:
            assert "flipped: " in str(error)


@pytest.mark.parametrize(
    "contents", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"BM" + bytes(60), b"GIF89a", b"P5\n9 9\n255\n"]
)
def test_a_file_that_is_not_an_image_is_named(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "what").write_bytes(contents)
    with pytest.raises(DataError, match="what: "):
        read_image(tmp_path / "what", channels=1)


def test_a_folder_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a file"):
        read_image(tmp_path, channels=1)
    with pytest.raises(DataError, match="absent: cannot read"):
        read_image(tmp_path / "absent", channels=1)


DIGITS = load_digits().test.images[:100]


def test_an_image_in_the_form_of_mnist_passes_unchanged() -> None:
    assert all(np.array_equal(fit_digit(image, 28, None), image) for image in DIGITS)
    assert all(np.array_equal(fit_digit(image, 28, False), image) for image in DIGITS)


def draw(ink: int, paper: int, size: tuple[int, int] = (300, 200), at: tuple[int, int] = (150, 20)) -> np.ndarray:
    image = Image.new("L", size, paper)
    left, top = at
    ImageDraw.Draw(image).line([(left, top), (left + 60, top), (left + 20, top + 120)], fill=ink, width=14)
    return np.asarray(image)[..., np.newaxis]


def test_dark_on_light_and_light_on_dark_give_the_same_digit() -> None:
    assert np.array_equal(fit_digit(draw(20, 240), 28, None), fit_digit(draw(235, 15), 28, None))


def test_the_place_of_the_digit_in_the_image_does_not_matter() -> None:
    assert np.array_equal(fit_digit(draw(0, 255), 28, None), fit_digit(draw(0, 255, (200, 400), (10, 210)), 28, None))


def test_a_fitted_digit_fills_20_of_28_pixels_and_is_centered_by_mass() -> None:
    for size in (28, 32, 56):
        fitted = fit_digit(draw(0, 255), size, None)
        assert fitted.shape == (size, size, 1)
        rows, columns = np.nonzero(fitted[..., 0])
        assert rows.max() - rows.min() + 1 == round(size * 20 / 28)
        weight = fitted[..., 0].astype(float)
        assert abs((weight.sum(1) @ np.arange(size)) / weight.sum() - size / 2) <= 0.51
        assert abs((weight.sum(0) @ np.arange(size)) / weight.sum() - size / 2) <= 0.51
        assert columns.max() - columns.min() < rows.max() - rows.min()


def test_the_contrast_between_ink_and_paper_is_kept() -> None:
    assert fit_digit(draw(60, 200), 28, None).max() == 140
    assert fit_digit(draw(200, 60), 28, None).min() == 0


def test_a_forced_sense_is_obeyed() -> None:
    light_on_dark = draw(255, 0)
    assert np.array_equal(fit_digit(light_on_dark, 28, False), fit_digit(light_on_dark, 28, None))
    assert not np.array_equal(fit_digit(light_on_dark, 28, True), fit_digit(light_on_dark, 28, None))


def test_color_and_grain_and_uneven_light_do_not_hide_the_digit() -> None:
    clean = draw(30, 220).astype(float)
    grain = np.random.default_rng(0).normal(0, 3, clean.shape)
    shade = np.linspace(0, -40, clean.shape[1])[None, :, None]
    photo = np.clip(clean + grain + shade, 0, 255).astype(np.uint8)
    fitted = fit_digit(np.repeat(photo, 3, 2), 28, None).astype(float)
    ideal = fit_digit(draw(30, 220), 28, None).astype(float)
    assert np.corrcoef(fitted.reshape(-1), ideal.reshape(-1))[0, 1] > 0.95


@pytest.mark.parametrize("value", [0, 100, 255])
def test_an_empty_page_gives_an_empty_digit(value: int) -> None:
    assert not fit_digit(np.full((50, 70, 1), value, np.uint8), 28, None).any()


@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (50, 1), (3, 2)])
def test_a_tiny_image_is_fitted(shape: tuple[int, int]) -> None:
    assert fit_digit(np.arange(shape[0] * shape[1], dtype=np.uint8).reshape(*shape, 1), 28, None).shape == (28, 28, 1)


def test_an_enlarged_digit_comes_back_nearly_as_it_was() -> None:
    for image in DIGITS[:20]:
        large = np.asarray(Image.fromarray(image[..., 0]).resize((280, 280), Image.Resampling.BICUBIC))[..., np.newaxis]
        back = fit_digit(255 - large, 28, None)[..., 0].astype(float)
        best = max(
            np.corrcoef(back.reshape(-1), np.roll(image[..., 0], (down, right), (0, 1)).reshape(-1))[0, 1]
            for down in (-2, -1, 0, 1, 2)
            for right in (-2, -1, 0, 1, 2)
        )
        assert best > 0.85
