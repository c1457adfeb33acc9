"""Arrays mapped from a file, strings in arrays, and what a hostile file of them can do: nothing."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from convolve.data.readers import index
from convolve.data.readers.locations import SampleLocation
from convolve.data.readers.mapped_arrays import map_arrays, write_arrays
from convolve.data.readers.texts import Texts

ARRAYS = {
    "numbers": np.arange(6, dtype=np.int64).reshape(3, 2),
    "bytes": np.frombuffer(b"some bytes", np.uint8),
    "none": np.empty((0, 4), np.float32),
    "real": np.linspace(0, 1, 5, dtype=np.float32),
}
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def write(folder):
    path = folder / "arrays"
    write_arrays(path, {"about": "arrays"}, ARRAYS)
    return path


def test_arrays_are_mapped_as_they_were_written(tmp_path):
    values, arrays = map_arrays(write(tmp_path))
    assert values == {"about": "arrays"} and arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype and np.array_equal(arrays[name], array)
    with pytest.raises(ValueError, match="read-only"):
        arrays["numbers"][0] = 1


def test_a_file_cut_or_changed_anywhere_is_damaged_or_the_same(tmp_path):
    path = write(tmp_path)
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position])
        with pytest.raises(DAMAGE):
            map_arrays(path)
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x15]) + whole[position + 1 :])
        try:
            values, arrays = map_arrays(path)
        except DAMAGE:
            continue
        # A flipped byte of the header can only change a name, a value or the form of the same bytes.
        assert all(array.nbytes <= len(whole) for array in arrays.values()), (position, values)


@pytest.mark.parametrize(
    "place",
    [
        ["<i8", [1 << 60], 0],
        ["<i8", [1 << 40, 1 << 40], 0],
        ["<i8", [2], 1 << 40],
        ["<i8", [2], -8],
        ["<i8", [-1], 0],
        ["<i8", [1.5], 0],
        ["|O", [1], 0],
        ["<i8", [1]],
        "x",
    ],
)
def test_a_header_cannot_reach_beyond_the_file(tmp_path, place):
    path = tmp_path / "arrays"
    write_arrays(path, {}, {"numbers": np.zeros(8, np.int64)})
    data = path.read_bytes()
    start = data.index(b"{")
    header = json.loads(data[start : data.rindex(b"}") + 1])
    body = data[-64:]
    header["arrays"]["numbers"] = place
    encoded = json.dumps(header).encode()
    head = data[: start - 8] + len(encoded).to_bytes(8, "little") + encoded
    path.write_bytes(head + bytes(-len(head) % 64) + body)
    with pytest.raises(DAMAGE):
        map_arrays(path)


def test_a_fifo_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        map_arrays(tmp_path / "fifo")


@given(some.lists(some.text()), some.data())
def test_texts_are_a_sequence_of_strings(texts, data):
    packed = Texts.pack(texts)
    assert packed.is_valid and list(packed) == texts and len(packed) == len(texts)
    rows = data.draw(some.lists(some.integers(0, len(texts) - 1), max_size=5) if texts else some.just([]))
    taken = packed.take(np.array(rows, np.int64))
    assert list(taken) == [texts[row] for row in rows]
    assert list(taken[1:]) == list(taken)[1:] and list(taken.take(np.arange(len(rows))[::-1])) == list(taken)[::-1]


def test_texts_that_end_outside_of_their_bytes_are_invalid():
    encoded = np.frombuffer(b"abc", np.uint8)
    for ends in ([4], [-1, 3], [2, 1], [[1], [2]]):
        assert not Texts(encoded, np.array(ends, np.int64)).is_valid


def build(root, calls):
    calls.append(root)
    boxes = ((0.1, 0.2, 0.3, 0.4), (0.5, 0.6, 0.7, 0.8))
    samples = [SampleLocation(0, 9 * n, 9, n % 2, f"s{n}", boxes[: n % 3]) for n in range(6)]
    return index.make_index(root, ["shard\udce9.tar"], samples)


def test_a_cached_index_equals_the_built_one_and_one_of_an_earlier_version_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    calls = []
    (tmp_path / "cache/indexes").mkdir(parents=True)
    old = index._cache_path(tmp_path, "train").with_suffix(".npz")
    old.write_bytes(b"an index of version 2")
    first, second = (index.load_or_build(tmp_path, "train", "s", lambda: build(tmp_path, calls)) for _ in range(2))
    assert len(calls) == 1 and not old.exists()
    expected = build(tmp_path, [])
    rows = np.array([5, 0, 2])
    for found in (first, second):
        assert [found.name(row) for row in range(6)] == [expected.name(row) for row in range(6)]
        assert all(np.array_equal(found.objects(row), expected.objects(row)) for row in range(6))
        taken = found.take(rows)
        assert list(taken.names) == ["s5", "s0", "s2"] and taken.labels.tolist() == [1, 0, 0]
        assert [len(taken.objects(row)) for row in range(3)] == [2, 0, 2]
        assert np.array_equal(taken.objects(2), expected.objects(2))


def test_a_hostile_cached_index_is_built_again(tmp_path, monkeypatch):
    """Its checksum is right, but it points outside of its arrays."""
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    whole = build(tmp_path, [])
    path = index._cache_path(tmp_path, "train")
    for name, value in {
        "places": np.full((6, 3), 7),
        "box_starts": np.array([0, 9, 0, 0, 0, 0, 0]),
        "file_ends": np.array([1 << 40]),
        "name_ends": np.arange(3),
        "labels": np.zeros(2, np.int64),
    }.items():
        index._store(whole, path, "s")
        values, arrays = map_arrays(path)
        write_arrays(tmp_path / "other", values, {**arrays, name: value})
        os.replace(tmp_path / "other", path)
        calls = []
        assert len(index.load_or_build(tmp_path, "train", "s", lambda: build(tmp_path, calls))) == 6  # noqa: B023
        assert calls, name


def test_a_cached_index_is_not_copied_into_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path / "cache"))
    found = index.load_or_build(tmp_path, "train", "s", lambda: build(tmp_path, []))
    for array in (found.places, found.files.encoded, found.files.ends, found.names.encoded, found.box_starts):
        assert not array.flags.owndata and not array.flags.writeable
