"""Records of a TFRecord file, read without TensorFlow. Runs in a sandbox, so imports are few.

Framing: u64 length, masked CRC-32C of it, payload, masked CRC-32C of the payload, all little-endian. The payload is a
`tf.train.Example`; only the part of protobuf that image data sets use is parsed.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from convolve.data.readers.crc32c import Offsets, crc32c_ranges, mask
from convolve.data.readers.locations import SampleLocation
from convolve.directory import read_regular
from convolve.errors import DataError

Feature = list[bytes] | list[int] | list[float]
_HEADER = 12
_FOOTER = 4
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LARGEST_SHARD = 1 << 33
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


def read_records(path: Path, *, limit: int = 1 << 30) -> list[memoryview]:
    """Return the payloads of one file after checking every CRC; an error names the first bad record and its offset."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise DataError(f"{path}: {size} bytes, more than the {limit} that are accepted")
        data = read_regular(path)
    except OSError as error:
        raise DataError(f"{path}: cannot read ({error.strerror or error})") from error
    starts, lengths = _find_records(data, path)
    _check_crcs(data, path, starts, lengths)
    view = memoryview(data)
    return [view[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]


def parse_example(record: bytes | memoryview) -> dict[str, Feature]:
    """Return the features of a `tf.train.Example` by name; raise ValueError if it is malformed."""
    features: dict[str, Feature] = {}
    for body in _messages(record, 1):
        for entry in _messages(body, 1):
            parts = dict(_fields(entry))
            name, value = parts.get(1), parts.get(2)
            if not isinstance(name, memoryview) or not isinstance(value, memoryview):
                raise ValueError("a feature without name or value")
            features[bytes(name).decode()] = _parse_feature(value)
    return features


def _parse_feature(feature: memoryview) -> Feature:
    values: Feature = []
    for kind, content in _fields(feature):
        if not isinstance(content, memoryview):
            raise ValueError("a feature that is not a list")
        if kind == 1:
            values = [bytes(item) for item in _messages(content, 1)]
        if kind == 2:
            values = [value for item in _messages(content, 1) for value in _floats(item)]
        if kind == 3:
            values = [_signed(item) for item in _numbers(content)]
    return values


def _floats(data: memoryview) -> tuple[float, ...]:
    if len(data) % 4:
        raise ValueError("a float of other than 4 bytes")
    return struct.unpack(f"<{len(data) // 4}f", data)


def _messages(data: bytes | memoryview, field: int) -> Iterator[memoryview]:
    for number, value in _fields(data):
        if number == field and isinstance(value, memoryview):
            yield value


def _numbers(data: memoryview) -> Iterator[int]:
    for number, value in _fields(data):
        if number == 1 and isinstance(value, int):
            yield value
        elif number == 1 and isinstance(value, memoryview):
            at = 0
            while at < len(value):
                item, at = _varint(value, at)
                yield item


def _fields(data: bytes | memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the fields of a protobuf message as (number, value): an int for a varint, otherwise the bytes."""
    view, at = memoryview(data), 0
    while at < len(view):
        key, at = _varint(view, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(view, at)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            length, at = _varint(view, at)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire}")
        if length > len(view) - at:
            raise ValueError(f"a field of {length} bytes, {len(view) - at} are left")
        yield key >> 3, view[at : at + length]
        at += length


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(view):
            raise ValueError("a number that is cut off")
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), at
    raise ValueError("a number of more than 64 bits")


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _find_records(data: bytes, path: Path) -> tuple[Offsets, Offsets]:
    starts: list[int] = []
    lengths: list[int] = []
    at, end = 0, len(data)
    while at < end:
        left = end - at - _HEADER - _FOOTER
        length = struct.unpack_from("<Q", data, at)[0] if left >= 0 else 0
        if length > left:
            _check_length_crcs(
                data, path, np.array([*starts, at + _HEADER], np.int64) if left >= 0 else np.array(starts)
            )
            raise damage(path, len(starts), f"needs {length} bytes, {max(left, 0)} are left: truncated", at)
        starts.append(at + _HEADER)
        lengths.append(length)
        at += _HEADER + length + _FOOTER
    return np.array(starts, np.int64), np.array(lengths, np.int64)


def _check_length_crcs(data: bytes, path: Path, starts: Offsets) -> None:
    heads = starts.astype(np.int64) - _HEADER
    computed = mask(crc32c_ranges(data, heads, np.full(len(heads), 8, np.int64)))
    _compare_crcs(data, path, heads, heads + 8, computed, "length")


def _check_crcs(data: bytes, path: Path, starts: Offsets, lengths: Offsets) -> None:
    _check_length_crcs(data, path, starts)
    computed = mask(crc32c_ranges(data, starts, lengths))
    _compare_crcs(data, path, starts - _HEADER, starts + lengths, computed, "contents")


def _compare_crcs(
    data: bytes, path: Path, heads: Offsets, crc_offsets: Offsets, computed: "np.typing.NDArray[np.uint32]", what: str
) -> None:
    stored = np.frombuffer(data, np.uint8)[crc_offsets[:, None] + np.arange(4)].copy().view("<u4").reshape(-1)
    wrong = np.flatnonzero(stored != computed)
    if len(wrong):
        first = int(wrong[0])
        raise damage(path, first, f"CRC of its {what} is wrong", int(heads[first]))


def damage(path: Path, record: int, problem: str, offset: int | None = None) -> DataError:
    """Return the error of a damaged record."""
    location = f"record {record}" if offset is None else f"record {record} at byte {offset}"
    return DataError(f"{path}: {location}: {problem}; get an undamaged copy")


def locate_samples(path: Path, number: int) -> list[SampleLocation]:
    """Return the locations of the samples of one file, which is file `number` of its index, checking every CRC."""
    samples = []
    at = 0
    for position, record in enumerate(read_records(path, limit=_LARGEST_SHARD)):
        at += 12  # length and its CRC
        samples.append(_locate(path, number, position, at, record))
        at += len(record) + 4
    if not samples:
        raise DataError(f"{path}: contains no record; get an undamaged copy")
    return samples


def _locate(path: Path, number: int, position: int, start: int, record: memoryview) -> SampleLocation:
    subject = f"{path}: record {position}"
    try:
        features = parse_example(record)
    except ValueError as error:
        raise DataError(f"{subject}: not a tf.train.Example ({error}); get an undamaged copy") from error
    from_one = "image/encoded" in features
    encoded = features.get("image/encoded") or features.get("image")
    label = features.get("image/class/label" if from_one else "label")
    if not encoded or not label or not isinstance(encoded[0], bytes) or not isinstance(label[0], int):
        needed = "image/encoded and image/class/label, or image and label"
        raise DataError(f"{subject}: has features {', '.join(sorted(features))}: needs {needed}")
    # Equal bytes earlier in the record would be the same image, so the first match is correct.
    offset = start + bytes(record).index(encoded[0])
    return SampleLocation(number, offset, len(encoded[0]), label[0] - from_one, f"{position}", _read_boxes(features))


def _read_boxes(features: dict[str, Feature]) -> tuple[tuple[float, float, float, float], ...]:
    corners = [features.get(f"image/object/bbox/{corner}", []) for corner in _CORNERS]
    same_length = len({len(values) for values in corners}) == 1
    if not same_length or not all(isinstance(value, float) for values in corners for value in values):
        return ()
    return tuple((float(a), float(b), float(c), float(d)) for a, b, c, d in zip(*corners, strict=True))
