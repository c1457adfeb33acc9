"""A box of a JPEG has the pixels of the same box in the whole image."""

import ctypes
import io
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import PIL
import pytest
import torch
from PIL import Image

from convolve.data.image_io import center_box
from convolve.data.loader.decoder import Decoder
from convolve.data.readers.index import WHOLE_FILE, make_index
from convolve.data.readers.locations import SampleLocation
from convolve.errors import DataError
from convolve.kernels import build, jpeg_region
from convolve.kernels.jpeg_region import Crop, Region, decode_whole
from convolve.kernels.resize import ResizeJob, resize
from convolve.runs.notices import report_whole_decoding


@pytest.fixture(scope="module")
def native():
    native = jpeg_region.load()
    if isinstance(native, build.Unavailable):
        pytest.skip(native.reason)
    return native


@pytest.fixture(scope="module")
def decode(native):
    return native.decode


def encode(height, width, mode="RGB", **options) -> bytes:
    chance = np.random.default_rng((height, width))
    small = Image.fromarray(chance.integers(0, 256, (7, 9, 3), np.uint8)).resize((width, height))
    noisy = np.clip(np.asarray(small) + chance.normal(0, 8, (height, width, 3)), 0, 255).astype(np.uint8)
    sink = io.BytesIO()
    Image.fromarray(noisy).convert(mode).save(sink, "JPEG", **options)
    return sink.getvalue()


def decode_part(decode, data, size, scale, box):
    height, width = -(-size[0] // scale), -(-size[1] // scale)
    region = Region(height, width, scale, *box)
    return decode(data, region, np.empty(region.buffer_bytes, np.uint8))


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGB", {"subsampling": "4:2:0"}),
        ("RGB", {"subsampling": "4:2:2"}),
        ("RGB", {"subsampling": "4:4:4"}),
        ("RGB", {"subsampling": "4:2:0", "progressive": True}),
        ("RGB", {"subsampling": "4:2:0", "restart_marker_blocks": 3}),
        ("L", {}),
    ],
)
@pytest.mark.parametrize("size", [(75, 121), (64, 64), (9, 40)])
def test_a_part_has_the_pixels_of_the_whole(decode, mode, options, size):
    data, chance = encode(*size, mode, **options), np.random.default_rng(0)
    for scale in (1, 2, 4, 8):
        height, width = -(-size[0] // scale), -(-size[1] // scale)
        whole = decode_whole(data, (height, width), None)
        for _ in range(12):
            top, left = (int(chance.integers(side)) for side in (height, width))
            rows, columns = int(chance.integers(1, height - top + 1)), int(chance.integers(1, width - left + 1))
            part = decode_part(decode, data, size, scale, (top, left, rows, columns))
            assert np.array_equal(part, whole[top : top + rows, left : left + columns])


def resize_parts(native, images, boxes, memory_bytes=1 << 20):
    """Return whether each box of the images of 64 x 64 could be decoded, and the targets."""
    targets = torch.full((len(images), 24, 30, 3), 7, dtype=torch.uint8)
    regions = [Region(64, 64, 1, *box) for box in boxes]
    crops = [Crop(*parts, flip=bool(n % 2)) for n, parts in enumerate(zip(images, regions, targets, strict=True))]
    return native.decode_crops(crops, np.empty(memory_bytes, np.uint8)), targets


KINDS = [
    ("RGB", {"subsampling": "4:2:0", "quality": 95}),
    ("RGB", {"subsampling": "4:4:4", "quality": 20}),
    ("L", {}),
    ("RGB", {"subsampling": "4:2:0", "progressive": True}),
    ("RGB", {"subsampling": "4:2:0", "restart_marker_blocks": 3, "optimize": True}),
]


def test_one_call_for_many_images_has_the_pixels_of_one_call_for_each(native):
    """Neither the image before nor one that fails changes the next one."""
    images = [encode(64, 64, mode, **options) for mode, options in KINDS] * 2
    images[3:3] = [images[0][:300], b"no image"]
    chance, boxes = np.random.default_rng(1), []
    for _ in images:
        top, left = (int(chance.integers(60)) for _ in range(2))
        boxes.append((top, left, int(chance.integers(1, 65 - top)), int(chance.integers(1, 65 - left))))
    boxes[3] = (0, 0, 64, 64)
    succeeded, targets = resize_parts(native, images, boxes)
    assert succeeded == [number not in (3, 4) for number in range(len(images))]
    expected = torch.full_like(targets, 7)
    for number in np.flatnonzero(succeeded):
        part = decode_part(native.decode, images[number], (64, 64), 1, boxes[number])
        resize([ResizeJob(part, expected[number], bool(number % 2))])
    assert torch.equal(targets[[0, 1, 2, 5, 6]], expected[[0, 1, 2, 5, 6]]) and torch.equal(targets[7:], expected[7:])


def test_an_image_without_huffman_tables_does_not_get_those_of_the_image_before(native):
    """Without tables, the usual ones apply; the image before has its own."""
    own, usual = encode(64, 64, optimize=True, quality=30), encode(64, 64)
    bare = usual
    while (start := bare.find(b"\xff\xc4")) >= 0:
        bare = bare[:start] + bare[start + 2 + int.from_bytes(bare[start + 2 : start + 4]) :]
    box = (0, 0, 64, 64)
    alone, after = resize_parts(native, [bare], [box]), resize_parts(native, [own, own, bare], [box] * 3)
    assert alone[0] == [True] and after[0] == [True] * 3
    assert torch.equal(after[1][2], alone[1][0]) and torch.equal(alone[1], resize_parts(native, [usual], [box])[1])


def test_a_box_that_does_not_fit_into_memory_fails_alone(native):
    boxes = [(0, 0, 64, 64), (0, 0, 4, 4)]
    assert resize_parts(native, [encode(64, 64)] * 2, boxes, 1000)[0] == [False, True]


@pytest.mark.parametrize("problem", ["other size", "too little memory", "damage", "no image", "empty"])
def test_what_cannot_be_decoded_is_none(decode, problem):
    data, size, box = encode(64, 64, subsampling="4:2:0"), (64, 64), (0, 0, 64, 64)
    if problem == "too little memory":
        assert decode(data, Region(64, 64, 1, *box), np.empty(100, np.uint8)) is None
        return
    size = (64, 65) if problem == "other size" else size
    middle = data.index(b"\xff\xda") + 40
    contents = {"damage": data[:middle] + b"\xff\xd9" + data[middle:], "no image": b"\xff\xd8\xff" * 50, "empty": b"\0"}
    assert decode_part(decode, contents.get(problem, data), size, 1, box) is None


def test_a_library_of_another_abi_is_rejected(decode):
    folder = Path(PIL.__file__).parents[1] / "torchvision.libs"
    path = next(folder.glob("libjpeg*.so.8"), None)
    if path is None:
        pytest.skip("no libjpeg of ABI 8 is installed")
    other = jpeg_region.bind(build.load("jpeg_region.c"), ctypes.CDLL(str(path)))
    assert decode_part(other.decode, encode(64, 64), (64, 64), 1, (0, 0, 9, 9)) is None
    assert not jpeg_region.matches_simplejpeg(other.decode)
    assert resize_parts(other, [encode(64, 64)], [(0, 0, 9, 9)])[0] == [False]


def test_a_decoder_with_other_pixels_is_not_used(decode):
    def brighter(*arguments):
        part = decode(*arguments)
        part[0, 0] ^= 1
        return part

    assert jpeg_region.matches_simplejpeg(decode) and not jpeg_region.matches_simplejpeg(brighter)


@pytest.mark.parametrize(
    ("contents", "reason"), [(None, "this Pillow contains no libjpeg-turbo"), (b"no library", "file too short")]
)
def test_whole_images_are_decoded_with_a_line_if_pillow_has_no_usable_libjpeg(decode, tmp_path, contents, reason):
    pillow, lines = tmp_path / "PIL", []
    console = SimpleNamespace(info=lines.append)
    for folder in (pillow, tmp_path / "pillow.libs"):
        folder.mkdir()
    if contents:
        (tmp_path / "pillow.libs" / "libjpeg.so").write_bytes(contents)
    images = make_index(tmp_path, ["0.jpg"], [SampleLocation(0, 0, WHOLE_FILE, 0, "0.jpg")])
    report_whole_decoding(images, console, lambda: jpeg_region.load(pillow))
    assert len(lines) == 1 and reason in lines[0] and "decoding whole images" in lines[0]
    report_whole_decoding(images, console)
    assert len(lines) == 1, "this Pillow has one"


def fill(folder, data, box, cache_bytes=0):
    (folder / "0.jpg").write_bytes(data)
    reader = make_index(folder, ["0.jpg"], [SampleLocation(0, 0, WHOLE_FILE, 0, "0.jpg")])
    target = torch.zeros((24, 24, 3), dtype=torch.uint8)
    Decoder(reader, cache_bytes).decode(0, box, target, flip=False)
    return target


@pytest.mark.parametrize("side", [20, 50, 110, 200])
def test_the_loader_has_the_same_pixels_with_its_cache_and_without_parts(decode, tmp_path, monkeypatch, side):
    data, box = encode(203, 251, subsampling="4:2:0"), lambda size: (3, 51, side, side)
    with_parts, cached = fill(tmp_path, data, box), fill(tmp_path, data, box, 1 << 20)
    monkeypatch.setattr(jpeg_region, "load", lambda: build.Unavailable("disabled"))
    assert torch.equal(with_parts, fill(tmp_path, data, box)) and torch.equal(with_parts, cached)


def test_a_truncated_image_is_an_error_wherever_the_box_is(decode, tmp_path):
    data = encode(203, 251)
    with pytest.raises(DataError, match="0.jpg"):
        fill(tmp_path, data[: len(data) * 3 // 4], lambda size: (0, 0, 10, 10))
    assert not jpeg_region.is_decodable(data[:-2], (203, 251))
    assert fill(tmp_path, data, lambda size: center_box(size, 0.5)).any()
