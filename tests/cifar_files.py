"""Small CIFAR sets in the binary version, and in the python version without running Python 2."""

import struct
from pathlib import Path

import numpy as np

from convolve.data.catalog import CIFAR10, CIFAR100, DatasetInfo

COUNT = 7


def records(entry: DatasetInfo, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return planes [N, 3072], fine labels and coarse labels."""
    chance = np.random.default_rng(seed)
    planes = chance.integers(0, 256, (COUNT, 3072), np.uint8)
    return planes, chance.integers(0, len(entry.classes), COUNT), chance.integers(0, 20, COUNT)


def write_binary(folder: Path, entry: DatasetInfo) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(entry.files):
        planes, fine, coarse = records(entry, number)
        labels = fine[:, None] if entry is CIFAR10 else np.stack((coarse, fine), 1)
        (folder / file.name).write_bytes(np.concatenate((labels.astype(np.uint8), planes), 1).tobytes())
    return folder


def old_pickle(fields: dict[bytes, object]) -> bytes:
    """Return a dict as Python 2 pickled it: protocol 2, byte strings, an array through _reconstruct."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value

    def array(value: np.ndarray) -> bytes:
        shape = b"".join(b"M" + struct.pack("<H", side) for side in value.shape) + b"\x86"
        kind = (
            b"cnumpy\ndtype\nq\x05U\x02u1K\x00K\x01\x87Rq\x06(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        )
        start = b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03"
        return start + b"(K\x01" + shape + kind + b"\x89" + text(value.tobytes()) + b"tb"

    def item(value: object) -> bytes:
        if isinstance(value, np.ndarray):
            return array(value)
        if isinstance(value, list):
            return b"]q\x07(" + b"".join(b"K" + bytes([one]) for one in value) + b"e"
        assert isinstance(value, bytes)
        return text(value)

    body = b"".join(text(key) + item(value) for key, value in fields.items())
    return b"\x80\x02}q\x00(" + body + b"u."


def write_python(folder: Path, entry: DatasetInfo) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(entry.files):
        planes, fine, coarse = records(entry, number)
        labels: dict[bytes, object] = {b"labels": fine.tolist()}
        if entry is CIFAR100:
            labels = {b"fine_labels": fine.tolist(), b"coarse_labels": coarse.tolist()}
        fields = {b"batch_label": b"training batch", **labels, b"data": planes}
        (folder / file.name.removesuffix(".bin")).write_bytes(old_pickle(fields))
    return folder
