"""TFRecord files for tests and benchmarks, in the layouts of ImageNet and of TFDS, written without TensorFlow."""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from convolve.data.readers.crc32c import crc32c_ranges, mask

Sample = tuple[bytes, int]


def varint(value: int) -> bytes:
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])


def message(number: int, body: bytes) -> bytes:
    """Return a protobuf field that contains bytes."""
    return bytes([number << 3 | 2]) + varint(len(body)) + body


def example(features: dict[str, bytes | int]) -> bytes:
    """Return a tf.train.Example."""
    entries = []
    for name, value in features.items():
        kind = message(1, message(1, value)) if isinstance(value, bytes) else message(3, message(1, varint(value)))
        entries.append(message(1, message(1, name.encode()) + message(2, kind)))
    return message(1, b"".join(entries))


def imagenet_example(data: bytes, label: int) -> bytes:
    return example({"image/encoded": data, "image/class/label": label + 1})


def tfds_example(data: bytes, label: int) -> bytes:
    return example({"image": data, "label": label})


def masked_crcs(pieces: Sequence[bytes]) -> list[int]:
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    found = mask(crc32c_ranges(b"".join(pieces), np.cumsum(lengths) - lengths, lengths))
    return [int(crc) for crc in found]


def write_records(path: Path, payloads: Sequence[bytes]) -> None:
    heads = [struct.pack("<Q", len(payload)) for payload in payloads]
    with path.open("wb") as sink:
        for head, head_crc, payload, crc in zip(
            heads, masked_crcs(heads), payloads, masked_crcs(payloads), strict=True
        ):
            sink.write(head + struct.pack("<I", head_crc) + payload + struct.pack("<I", crc))


def write_shards(
    root: Path, stem: str, samples: Sequence[Sample], shards: int, make: Callable[[bytes, int], bytes]
) -> None:
    """Write the samples in order to files `stem-00000-of-0000N`."""
    root.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        rows = range(shard * len(samples) // shards, (shard + 1) * len(samples) // shards)
        write_records(root / f"{stem}-{shard:05d}-of-{shards:05d}", [make(*samples[row]) for row in rows])


def write_imagenet(root: Path, train: Sequence[Sample], test: Sequence[Sample], shards: int = 2) -> None:
    write_shards(root, "train", train, shards, imagenet_example)
    write_shards(root, "validation", test, 1, imagenet_example)


def write_tfds(root: Path, train: Sequence[Sample], test: Sequence[Sample], shards: int = 1) -> None:
    write_shards(root, "little-train.tfrecord", train, shards, tfds_example)
    write_shards(root, "little-test.tfrecord", test, 1, tfds_example)
