"""Ten thousand damaged inputs: each is an image or a named error, none crashes, hangs or takes the memory."""

import hashlib
import io
import shutil
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from convolve.data.image_io import center_box
from convolve.data.loader.decoder import Decoder
from convolve.data.readers.records import locate_samples as read_records
from convolve.data.readers.tar_members import locate_samples as read_tar
from convolve.errors import DataError

FOREIGN = Path(__file__).parents[1] / "fixtures" / "foreign"
SLOWEST_SECONDS = 2.0


class OneImage:
    """A source that holds one image."""

    def __init__(self, data):
        self.data = data

    def name(self, row):
        return "the-image"

    def read(self, row):
        return self.data


def decode(data):
    """The pixels, or None for a named error."""
    pixels = torch.zeros((32, 32, 3), dtype=torch.uint8)
    try:
        Decoder(OneImage(data), 0).decode(0, lambda size: center_box(size, 0.9), pixels, flip=False)
    except DataError as error:
        assert str(error).startswith("the-image: ") and "\n" not in str(error)
        return None
    return pixels


def mutate(data, chance):
    """Flipped bytes, a cut, a doubled or a removed piece."""
    mutant = bytearray(data)
    kind = chance.integers(0, 4)
    start, end = sorted(chance.integers(0, len(data), 2).tolist())
    if kind == 0:
        for place in chance.integers(0, len(data), chance.integers(1, 9)):
            mutant[place] = chance.integers(0, 256)
    elif kind == 1:
        del mutant[start:]
    elif kind == 2:
        mutant[start:start] = mutant[start:end]
    else:
        del mutant[start:end]
    return bytes(mutant)


def encode(kind, **options):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 5, 3), np.uint8)).resize((60, 48))
    buffer = io.BytesIO()
    image.convert(options.pop("mode", "RGB")).save(buffer, kind, **options)
    return buffer.getvalue()


IMAGES = {
    "jpeg": lambda: encode("JPEG"),
    "progressive": lambda: encode("JPEG", progressive=True),
    "cmyk": lambda: encode("JPEG", mode="CMYK"),
    "png": lambda: encode("PNG"),
    "palette": lambda: encode("PNG", mode="P"),
    "gif": lambda: encode("GIF"),
    "webp": lambda: encode("WEBP"),
}


FEW_OR_ALL = pytest.mark.parametrize("rounds", [100, pytest.param(1100, marks=pytest.mark.slow)])


@pytest.mark.filterwarnings("ignore")
@FEW_OR_ALL
@pytest.mark.parametrize("kind", IMAGES)
def test_a_mutated_image_is_an_image_or_a_named_error(kind, rounds, counted):
    data, chance = IMAGES[kind](), np.random.default_rng(7)
    assert decode(data) is not None
    counts = {True: 0, False: 0}
    for _ in counted.each("image fuzzed", range(rounds)):
        start = time.process_time()
        counts[decode(mutate(data, chance)) is not None] += 1
        assert time.process_time() - start < SLOWEST_SECONDS
    assert counts[False] > rounds // 10


@pytest.mark.parametrize(
    ("name", "read"),
    [("train-00000-of-00002", read_records), ("tars/train-000000.tar", read_tar)],
    ids=["tfrecord", "tar"],
)
@FEW_OR_ALL
def test_a_mutated_file_of_images_is_read_or_a_named_error(tmp_path, name, read, rounds, counted):
    data, chance = (FOREIGN / name).read_bytes(), np.random.default_rng(3)
    path = tmp_path / Path(name).name
    failed = 0
    for _ in counted.each("tar or TFRecord fuzzed", range(rounds + 100)):
        path.write_bytes(mutate(data, chance))
        start = time.process_time()
        try:
            places = read(path, 0)
        except DataError as error:
            failed += 1
            assert path.name in str(error) and "\n" not in str(error)
        else:
            size = path.stat().st_size
            assert all(0 <= place.offset <= place.offset + place.length <= size for place in places)
        assert time.process_time() - start < SLOWEST_SECONDS
    assert failed > rounds // 4


def png_of(width, height):
    """A PNG that announces a size and holds a few bytes."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


@pytest.mark.filterwarnings("ignore")
def test_bombs_are_rejected_before_memory_is_taken():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    jpeg = bytearray(encode("JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65000, 65000)
    for bomb in (bytes(jpeg), png_of(60_000, 60_000), png_of(2**31 - 1, 2**31 - 1)):
        assert decode(bomb) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


def test_a_tar_that_announces_a_huge_member_takes_no_memory(tmp_path):
    path = Path(shutil.copy(FOREIGN / "tars" / "train-000000.tar", tmp_path))
    data = bytearray(path.read_bytes())
    data[124:136] = b"77777777777\0"
    data[148:156] = b"        "
    data[148:156] = f"{sum(data[:512]):06o}\0 ".encode()
    path.write_bytes(data)
    with pytest.raises(DataError, match="train-000000.tar"):
        read_tar(path, 0)
    assert len(hashlib.sha256(path.read_bytes()).hexdigest()) == 64
