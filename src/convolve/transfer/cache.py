"""Features that were computed before, by the content of the image.

One file for each combination of weights and preprocessing, `features/KEY.bin` in the cache folder. It consists of equal
records, appended as they are computed, so a killed process loses only the last few:

    sha256 of the image file (32 bytes), features (float32), crc32 of both (4 bytes)

A record with a wrong checksum is ignored. Files that were not used for longest are removed when all of them together
would exceed the size limit.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from convolve import device
from convolve.files import hold_lock, remove_quietly

FeatureArray = npt.NDArray[np.float32]
MAX_BYTES = 2 << 30
_DIGEST, _CHECKSUM = 32, 4


def features_folder() -> Path:
    """Return the folder of all cached features."""
    return device.cache_folder() / "features"


def cache_key(**parts: Any) -> str:
    """Return the name of a file for everything that the features depend on besides the image."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


class FeatureCache:
    """Features of `width` numbers by the sha256 of the image file. Errors of the disk disable it."""

    def __init__(self, path: Path, width: int, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self.width = width
        self._record = _DIGEST + 4 * width + _CHECKSUM
        self._max_bytes = max_bytes

    def fill(self, digests: Sequence[bytes], features: FeatureArray) -> npt.NDArray[np.bool_]:
        """Write the stored features of images into their rows [N, width], and return which rows have some.

        The file may hold far more images than these, so it is read record by record.
        """
        found = np.zeros(len(digests), np.bool_)
        rows: dict[bytes, list[int]] = {}
        for row, digest in enumerate(digests):
            rows.setdefault(digest, []).append(row)
        with suppress(OSError), open(self._path, "rb") as file:
            os.utime(self._path)
            while len(record := file.read(self._record)) == self._record:
                wanted = rows.get(record[:_DIGEST])
                if wanted and zlib.crc32(record[:-_CHECKSUM]) == int.from_bytes(record[-_CHECKSUM:], "little"):
                    features[wanted] = np.frombuffer(record, "<f4", self.width, _DIGEST)
                    found[wanted] = True
        return found

    def append(self, digests: Sequence[bytes], features: FeatureArray) -> None:
        """Add records; without space for them, nothing happens."""
        bodies = (digest + row.astype("<f4").tobytes() for digest, row in zip(digests, features, strict=True))
        data = b"".join(body + zlib.crc32(body).to_bytes(_CHECKSUM, "little") for body in bodies)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with hold_lock(self._path.with_suffix(".lock"), lambda: None):
                if self._make_space(len(data)):
                    self._write(data)
        except OSError:
            return

    def _write(self, data: bytes) -> None:
        with open(self._path, "ab") as file:
            file.truncate(file.tell() // self._record * self._record)  # a killed process may have left a part of one
            file.write(data)

    def _make_space(self, needed: int) -> bool:
        """Remove the files used least recently until all fit; return False if this one alone does not."""
        sizes = {path: path.stat() for path in self._path.parent.glob("*.bin")}
        own = sizes[self._path].st_size if self._path in sizes else 0
        if own + needed > self._max_bytes:
            return False
        total = sum(status.st_size for status in sizes.values()) + needed
        for path, status in sorted(sizes.items(), key=lambda item: item[1].st_mtime):
            if total <= self._max_bytes:
                break
            if path != self._path:
                remove_quietly(path)
                total -= status.st_size
        return True


def digest_of(parts: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return the sha256 of named arrays."""
    total = hashlib.sha256()
    for name, array in sorted(parts.items()):
        total.update(f"{name} {array.dtype} {array.shape}".encode())
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()
