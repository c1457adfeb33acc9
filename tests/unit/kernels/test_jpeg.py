"""Many JPEGs read by one native call: the same bytes, sizes, pixels and errors as one by one."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from convolve.data.image_io import center_box
from convolve.data.loader.decoder import Decoder, Sample, jpeg_size
from convolve.data.readers.index import WHOLE_FILE, Index, make_index
from convolve.data.readers.locations import SampleLocation
from convolve.errors import DataError
from convolve.kernels import build
from convolve.kernels.jpeg import read_jpegs

BYTES = 1 << 20


@pytest.fixture(autouse=True)
def compiler():
    library = build.load("jpeg.c")
    if isinstance(library, build.Unavailable):
        pytest.skip(library.reason)


def encode(size=(40, 56), mode="RGB", **options) -> bytes:
    """Make an image of soft shapes, which compresses like a photograph."""
    chance = np.random.default_rng(size)
    small = Image.fromarray(chance.integers(0, 256, (5, 7, 3), np.uint8))
    sink = io.BytesIO()
    small.resize(size[::-1]).convert(mode).save(sink, **{"format": "JPEG", **options})
    return sink.getvalue()


def write_index(root: Path, contents: list[bytes]) -> Index:
    """Write each image to a separate file."""
    places = []
    for number, data in enumerate(contents):
        (root / f"{number}.jpg").write_bytes(data)
        places.append(SampleLocation(number, 0, WHOLE_FILE, 0, f"{number}.jpg"))
    return make_index(root, [place.name for place in places], places)


def turned() -> bytes:
    note = Image.Exif()
    note[0x0112] = 6
    return encode(exif=note)


PLAIN = {
    "colors": encode(),
    "gray": encode(mode="L"),
    "progressive": encode(progressive=True),
    "no subsampling": encode(subsampling=0),
    "commented": encode(comment=b"a comment"),
    "restarts": encode(restart_marker_blocks=2),
    "large": encode((700, 900)),
}
OTHER = {
    "CMYK": encode(mode="CMYK"),
    "turned": turned(),
    "PNG": encode(format="PNG"),
    "header only": PLAIN["colors"][:200],
    "garbage in front of a marker": PLAIN["colors"][:2] + b"\x00" + PLAIN["colors"][2:],
    "two bytes": b"\xff\xd8",
    "nothing": b"",
}


def test_plain_jpegs_are_read_with_the_bytes_and_the_size_that_one_by_one_gives(tmp_path):
    index = write_index(tmp_path, list(PLAIN.values()))
    rows = list(range(len(PLAIN)))
    found = index.read_jpegs(rows, np.empty(BYTES, np.uint8))
    assert list(found) == rows
    for row, jpeg in found.items():
        assert jpeg.data == index.read(row)
        assert jpeg.size == jpeg_size(index.read(row))


def test_everything_else_is_left_to_be_read_one_by_one(tmp_path):
    index = write_index(tmp_path, [*OTHER.values(), PLAIN["colors"]])
    assert list(index.read_jpegs(range(len(index)), np.empty(BYTES, np.uint8))) == [len(OTHER)]


def test_pieces_of_a_large_file_are_found_by_offset_and_length(tmp_path):
    data = b"tar" * 100 + b"".join(PLAIN.values())
    (tmp_path / "shard").write_bytes(data)
    starts = np.cumsum([300, *map(len, PLAIN.values())]).tolist()
    places = [SampleLocation(0, at, len(one), 0, "x") for at, one in zip(starts, PLAIN.values(), strict=False)]
    index = make_index(tmp_path, ["shard"], [*places, SampleLocation(0, len(data) - 50, 100, 0, "beyond the end")])
    found = index.read_jpegs(list(range(len(index))), np.empty(BYTES, np.uint8))
    assert [bytes(jpeg.data) for jpeg in found.values()] == list(PLAIN.values())
    with pytest.raises(DataError, match="beyond the end: contains 50 of 100 bytes"):
        index.read(len(PLAIN))


def test_images_that_do_not_fit_are_skipped_and_no_memory_behind_is_touched(tmp_path):
    one = PLAIN["colors"]
    index = write_index(tmp_path, [one, PLAIN["large"], one, one])
    # A whole file needs a byte more than it has: only so is its end seen.
    for size, expected in ((2 * len(one) + 1, [0, 2]), (2 * len(one), [0]), (len(one), []), (0, [])):
        around = np.full(BYTES, 77, np.uint8)
        assert list(index.read_jpegs([0, 1, 2, 3], around[:size])) == expected
        assert (around[size:] == 77).all()


def test_a_missing_file_is_left_to_the_reader_that_names_it(tmp_path):
    index = write_index(tmp_path, [PLAIN["colors"]] * 2)
    (tmp_path / "0.jpg").unlink()
    assert list(index.read_jpegs([0, 1], np.empty(BYTES, np.uint8))) == [1]
    with pytest.raises(DataError, match=r"0\.jpg: cannot read \(No such file"):
        index.read(0)


def test_no_images_and_no_compiler_are_accepted(tmp_path, monkeypatch):
    index = write_index(tmp_path, [PLAIN["colors"]])
    memory = np.empty(BYTES, np.uint8)
    assert index.read_jpegs([], memory) == {}
    monkeypatch.setattr("convolve.kernels.jpeg.load", lambda: None)
    assert read_jpegs([b"x"], index.places, memory) == [None]
    assert index.read_jpegs([0], memory) == {}


def decode(decoder: Decoder, row: int) -> torch.Tensor | str:
    """The pixels, or the error's words."""
    target = torch.zeros((32, 32, 3), dtype=torch.uint8)
    try:
        decoder.decode(row, lambda size: center_box(size, 0.9), target, flip=False)
    except DataError as error:
        return str(error)
    return target


def damage(data: bytes, chance: np.random.Generator) -> bytes:
    """A few wrong bytes, most of them in the header, or a piece that is missing."""
    mutant = bytearray(data)
    if chance.random() < 0.3:
        start, end = sorted(chance.integers(2, len(data), 2).tolist())
        del mutant[start:end]
        return bytes(mutant)
    end = 700 if chance.random() < 0.8 else len(data)
    for place in chance.integers(0, min(end, len(data)), chance.integers(1, 5)):
        mutant[place] = chance.integers(0, 256)
    return bytes(mutant)


def test_images_decoded_together_have_the_pixels_and_errors_of_others_even_if_damaged(tmp_path):
    chance = np.random.default_rng(4)
    whole = [data for name, data in (PLAIN | OTHER).items() if len(data) > 100 and name != "large"]
    index = write_index(tmp_path, [*whole, *(damage(whole[number % len(whole)], chance) for number in range(800))])
    together, alone = Decoder(index, 0), Decoder(index, 0)
    outcomes = []
    for start in range(0, len(index), 16):
        rows = range(start, min(start + 16, len(index)))
        targets = torch.zeros((len(rows), 32, 32, 3), dtype=torch.uint8)
        errors = together.decode_all(
            [Sample(row, lambda size: center_box(size, 0.9), targets[n], False) for n, row in enumerate(rows)]
        )
        for number, row in enumerate(rows):
            one, other = str(errors[number]) if number in errors else targets[number], decode(alone, row)
            assert one == other if isinstance(one, str) else torch.equal(one, torch.as_tensor(other)), index.name(row)
            outcomes.append(isinstance(one, str))
    assert 100 < sum(outcomes) < len(index) - 100, "both outcomes are tried"
