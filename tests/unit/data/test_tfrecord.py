import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from convolve.data.readers.records import parse_example, read_records
from convolve.data.readers.tfrecord import read_examples
from convolve.download import ignore_progress
from convolve.errors import DataError
from data_samples import example, field_bytes, frame


def to_png(pixels: np.ndarray) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    return sink.getvalue()


GRAY = np.random.default_rng(3).integers(0, 256, (6, 9, 8), np.uint8)


def write(path: Path, payloads: list[bytes]) -> Path:
    path.write_bytes(b"".join(map(frame, payloads)))
    return path


@pytest.mark.parametrize("packed", [True, False])
def test_images_and_labels_come_back_exactly(tmp_path: Path, packed: bool) -> None:
    payloads = [example(to_png(pixels), number, packed=packed) for number, pixels in enumerate(GRAY)]
    images, labels = read_examples(write(tmp_path / "r", payloads), ignore_progress)
    assert np.array_equal(images[..., 0], GRAY)
    assert labels.tolist() == list(range(6))


def test_color_images_keep_three_channels(tmp_path: Path) -> None:
    color = GRAY[:3].transpose(1, 2, 0).copy()
    images, _ = read_examples(write(tmp_path / "r", [example(to_png(color), 1)]), ignore_progress)
    assert np.array_equal(images[0], color)


def test_payloads_of_any_length_pass_the_crc(tmp_path: Path) -> None:
    payloads = [b"", b"a", b"b" * 64, b"c" * 200]
    assert [bytes(record) for record in read_records(write(tmp_path / "r", payloads))] == payloads


def test_a_negative_label_is_understood() -> None:
    minus_one = b"\x08" + b"\xff" * 9 + b"\x01"
    entry = field_bytes(1, b"label") + field_bytes(2, field_bytes(3, minus_one))
    assert parse_example(field_bytes(1, field_bytes(1, entry))) == {"label": [-1]}


def test_float_features_are_read_and_unknown_fields_passed_over() -> None:
    floats = field_bytes(1, b"box") + field_bytes(2, field_bytes(2, field_bytes(1, b"\0" * 8)))
    unknown = bytes([5 << 3 | 5]) + b"abcd" + bytes([6 << 3 | 1]) + b"abcdefgh"
    assert parse_example(unknown + field_bytes(1, field_bytes(1, floats))) == {"box": [0.0, 0.0]}


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "a field of .* bytes, 0 are left"),
        (b"\x0a", "a number that is cut off"),
        (b"\xff" * 11, "more than 64 bits"),
        (b"\x0b", "wire type 3"),
        (field_bytes(1, b""), "needs bytes 'image' and int64 'label'"),
        (example(b"not a png", 1), "not a readable PNG"),
    ],
)
def test_a_record_that_is_no_image_example_is_named(tmp_path: Path, payload: bytes, problem: str) -> None:
    good = example(to_png(GRAY[0]), 1)
    with pytest.raises(DataError, match=f"record 1: .*{problem}"):
        read_examples(write(tmp_path / "r", [good, payload]), ignore_progress)


def test_images_of_different_sizes_are_rejected(tmp_path: Path) -> None:
    payloads = [example(to_png(GRAY[0]), 1), example(to_png(GRAY[0][:5]), 1)]
    with pytest.raises(DataError, match=r"record 1: image of \(5, 8, 1\)"):
        read_examples(write(tmp_path / "r", payloads), ignore_progress)


def test_an_empty_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no record"):
        read_examples(write(tmp_path / "r", []), ignore_progress)
