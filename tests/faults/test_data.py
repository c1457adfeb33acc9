"""Damaged data files: every one gives a DataError of one line that names it, and none costs memory."""

import gzip
import io
import random
import resource
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from convolve.data.readers.crc32c import mask
from convolve.data.readers.mnist import pack_idx, read_images, read_labels, read_npz
from convolve.data.readers.records import read_records
from convolve.data.readers.tfrecord import read_examples
from convolve.download import ignore_progress
from convolve.errors import DataError
from data_samples import crc32c
from fault_ledger import Ledger

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 28, 28), np.uint8)
LABELS = np.arange(12)


def masked(data: bytes) -> bytes:
    return mask(np.array([crc32c(data)], np.uint32)).astype("<u4").tobytes()


def frame(payload: bytes, length: int | None = None) -> bytes:
    head = struct.pack("<Q", len(payload) if length is None else length)
    return head + masked(head) + payload + masked(payload)


def delimited(number: int, body: bytes) -> bytes:
    return bytes([number << 3 | 2, len(body) & 127 | 128, len(body) >> 7]) + body


def example(pixels: np.ndarray, label: int) -> bytes:
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    image = delimited(1, b"image") + delimited(2, delimited(1, delimited(1, png.getvalue())))
    kind = delimited(1, b"label") + delimited(2, delimited(3, bytes([8, label])))
    return delimited(1, delimited(1, image) + delimited(1, kind))


def expect_one_line(path: Path, read) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    line = str(caught.value)
    assert str(path) in line
    assert "\n" not in line
    return line


def memory_kilobytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["raw", "gzip"])
def test_an_idx_file_cut_anywhere_is_named(tmp_path: Path, pack, counted: Ledger) -> None:
    whole = pack(pack_idx(IMAGES))
    path = tmp_path / "cut"
    for part in counted.each("input cut at a 64th", range(64)):
        path.write_bytes(whole[: len(whole) * part // 64])
        expect_one_line(path, read_images)
    path.write_bytes(whole[:-1])
    expect_one_line(path, read_images)


def test_no_images_of_an_impossible_size_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "images-idx3-ubyte"
    path.write_bytes(bytes((0, 0, 8, 3)) + struct.pack(">3I", 0, 2**32 - 1, 2**32 - 6))
    assert "announces 0 x 4294967295 x 4294967290" in expect_one_line(path, read_images)


def test_every_flipped_byte_of_a_gzip_idx_file_is_noticed_or_harmless(tmp_path: Path, counted: Ledger) -> None:
    whole = gzip.compress(pack_idx(IMAGES), mtime=0)
    path = tmp_path / "flipped"
    chance = random.Random(0)
    places = [*range(40), *(chance.randrange(len(whole)) for _ in range(300))]
    for place in counted.each("input byte flipped", places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            assert np.array_equal(read_images(path), IMAGES), f"flip at {place} changed the images unnoticed"
        except DataError as error:
            assert str(path) in str(error)


def test_the_error_for_a_truncated_raw_file_names_the_expected_size(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(pack_idx(IMAGES)[:-5])
    assert "announces 12 x 28 x 28 = 9408 bytes but has 9403: truncated" in expect_one_line(path, read_images)


def test_bytes_after_the_end_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "long"
    for contents in (pack_idx(LABELS) + b"\0", gzip.compress(pack_idx(LABELS) + b"\0")):
        path.write_bytes(contents)
        assert "too long" in (line := expect_one_line(path, read_labels)) or "continues after" in line


def test_a_header_that_announces_a_huge_size_takes_no_memory(tmp_path: Path) -> None:
    header = struct.pack(">BBBB3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1)
    path = tmp_path / "moon"
    before = memory_kilobytes()
    for contents in (header, gzip.compress(header), gzip.compress(header + bytes(10_000_000))):
        path.write_bytes(contents)
        expect_one_line(path, read_images)
    assert memory_kilobytes() - before < 200_000


def test_a_header_within_the_limit_that_the_gzip_cannot_hold_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "hollow"
    path.write_bytes(gzip.compress(struct.pack(">BBBB3I", 0, 0, 8, 3, 1_000_000, 28, 28)))
    assert "of gzip can contain" in expect_one_line(path, read_images)


def test_a_bomb_behind_an_honest_header_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    with gzip.open(path, "wb", 1) as sink:
        sink.write(pack_idx(LABELS))
        for _ in range(400):
            sink.write(bytes(1 << 20))
    before = memory_kilobytes()
    assert "continues after the announced 20 bytes" in expect_one_line(path, read_labels)
    assert memory_kilobytes() - before < 100_000


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other"
    for contents in (b"", b"\0", b"<html>", b"\x1f\x8b", gzip.compress(b"<html>"), b"\0\0\x0d\x03" + bytes(20)):
        path.write_bytes(contents)
        expect_one_line(path, read_images)


def npz_bytes(**changes: np.ndarray) -> bytes:
    sink = io.BytesIO()
    np.savez_compressed(
        sink, **{"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES[:3], "y_test": LABELS[:3], **changes}
    )
    return sink.getvalue()


def test_an_npz_file_cut_anywhere_is_named(tmp_path: Path, counted: Ledger) -> None:
    whole = npz_bytes()
    path = tmp_path / "mnist.npz"
    for part in counted.each("input cut at a 64th", range(64)):
        path.write_bytes(whole[: len(whole) * part // 64])
        expect_one_line(path, read_npz)


def test_every_flipped_byte_of_an_npz_file_is_noticed_or_harmless(tmp_path: Path, counted: Ledger) -> None:
    whole = npz_bytes()
    path = tmp_path / "mnist.npz"
    chance = random.Random(1)
    for place in counted.each("input byte flipped", [chance.randrange(len(whole)) for _ in range(400)]):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            arrays = read_npz(path)
            assert np.array_equal(arrays[0], IMAGES)
            assert np.array_equal(arrays[1], LABELS)
        except DataError as error:
            assert str(path) in str(error)


class Canary:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return Path.touch, (self.mark,)


def test_a_pickle_in_an_npz_file_is_never_run(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    objects = np.empty(1, object)
    objects[0] = Canary(tmp_path / "mark")
    path.write_bytes(npz_bytes(x_train=objects))
    assert "must be integers" in expect_one_line(path, read_npz)
    assert not (tmp_path / "mark").exists()


def test_a_zip_bomb_is_rejected_by_its_announced_size(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x_train.npy", "w") as sink:
        for _ in range(64):
            sink.write(bytes(1 << 20))
    before = memory_kilobytes()
    line = expect_one_line(path, lambda path: read_npz(path, limit=1 << 20))
    assert "more than the 1048576 that are accepted" in line
    assert memory_kilobytes() - before < 50_000


def test_an_npz_header_that_announces_a_huge_size_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "mnist.npz"
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (2**40, 28, 28)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train.npy", head.getvalue())
    assert "announces shape" in expect_one_line(path, read_npz)


RECORDS = [example(pixels, label) for label, pixels in enumerate(IMAGES)]


def read_tfrecord(path: Path) -> tuple[np.ndarray, np.ndarray]:
    return read_examples(path, ignore_progress)


def test_a_tfrecord_cut_within_a_record_names_the_record(tmp_path: Path) -> None:
    whole = b"".join(map(frame, RECORDS))
    ends = set(np.cumsum([len(record) + 16 for record in RECORDS]).tolist())
    path = tmp_path / "cut"
    for part in range(1, 64):
        size = len(whole) * part // 64
        if size not in ends:
            path.write_bytes(whole[:size])
            record = sum(end <= size for end in ends)
            assert f"record {record} at byte " in expect_one_line(path, read_tfrecord)


def test_every_flipped_byte_of_a_tfrecord_names_its_record(tmp_path: Path, counted: Ledger) -> None:
    sizes = [len(record) + 16 for record in RECORDS]
    whole = b"".join(map(frame, RECORDS))
    starts = np.cumsum([0, *sizes])
    path = tmp_path / "flipped"
    chance = random.Random(2)
    places = [
        *range(20),
        *(int(starts[3]) + place for place in range(14)),
        *(chance.randrange(len(whole)) for _ in range(150)),
    ]
    for place in counted.each("input byte flipped", places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        record = int(np.searchsorted(starts, place, "right")) - 1
        assert f"record {record} at byte {starts[record]}: " in expect_one_line(path, read_tfrecord)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40])
def test_an_absurd_length_with_a_valid_crc_takes_no_memory(tmp_path: Path, length: int) -> None:
    path = tmp_path / "absurd"
    path.write_bytes(frame(RECORDS[0]) + frame(b"small", length))
    assert f"record 1 at byte {len(RECORDS[0]) + 16}: needs {length} bytes" in expect_one_line(path, read_records)


def test_an_image_bomb_in_a_tfrecord_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(frame(example(np.zeros((2, 8000), np.uint8), 1)))
    assert "sides must be at most 4096" in expect_one_line(path, read_tfrecord)


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as sink:
        sink.truncate(1 << 31)
    assert "that are accepted" in expect_one_line(path, read_records)
