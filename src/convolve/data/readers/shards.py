"""Find the samples of archives in a sandbox: a child that can neither write, connect nor start processes.

Tars and TFRecords come from others, and their parsers see every byte that these choose. The child may read the shards
of one split and nothing else of the data. It gets the path of one shard in each call, and returns the locations of its
samples as JSON, within limits on time, memory and size that follow from the size of the shard.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Literal

from convolve.confinement import Limits
from convolve.data.readers import records, tar_members
from convolve.data.readers.locations import SampleLocation, SkippedEntries
from convolve.errors import DataError, SandboxError
from convolve.sandbox import Sandbox

ArchiveKind = Literal["tar", "tfrecord"]
Located = tuple[list[SampleLocation], SkippedEntries]
_SECONDS, _BYTES_PER_SECOND = 60.0, 4 << 20
_MEMORY_BYTES, _MEMORY_FACTOR = 1 << 30, 4
_RESULT_BYTES = 1 << 20


def limits_for(size: int) -> Limits:
    """Return the limits for a shard of `size` bytes. A sample takes 1 kB of a tar or more, and less of the result."""
    return Limits(
        memory_bytes=_MEMORY_BYTES + _MEMORY_FACTOR * size,
        result_bytes=_RESULT_BYTES + size,
        seconds=_SECONDS + size / _BYTES_PER_SECOND,
    )


class ShardIndexer:
    """Locates the samples of the shards of a split. Use it as a context, which ends the child."""

    def __init__(self, kind: ArchiveKind, shards: Sequence[Path]) -> None:
        self._kind = kind
        readable = [path.absolute() for path in shards]
        self.sandbox = Sandbox("convolve.data.readers.shards:locate_in_child", readable=readable)

    def __enter__(self) -> "ShardIndexer":
        """Limit the memory by the largest shard. The child starts with the first call."""
        self.sandbox.limits = limits_for(max(map(_size, map(Path, self.sandbox.readable)), default=0))
        return self

    def __exit__(self, *error: object) -> None:
        self.sandbox.close()

    def locate(self, path: Path, number: int) -> Located:
        """Return the samples of one shard, which is file `number` of its index, and what it has besides."""
        limits = limits_for(_size(path))
        self.sandbox.limits = replace(self.sandbox.limits, seconds=limits.seconds, result_bytes=limits.result_bytes)
        call = {"kind": self._kind, "path": str(path.absolute()), "number": number}
        try:
            return _unpack(self.sandbox.call(json.dumps(call).encode()), number)
        except DataError as error:
            raise DataError(str(error).replace(str(path.absolute()), str(path))) from None
        except SandboxError as error:
            raise DataError(f"{path}: cannot index safely ({error.problem}); get an undamaged copy") from None


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise DataError(f"{path}: cannot read ({error.strerror or error})") from error


def _unpack(result: bytes, number: int) -> Located:
    """Return the result of a child. It may be compromised, so types are checked."""
    skipped = SkippedEntries()
    try:
        found = json.loads(result)
        samples = [_sample(number, *entry) for entry in found["samples"]]
        for reason, (count, example) in found["skipped"].items():
            skipped.reasons[str(reason)] = int(count), str(example)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SandboxError("sandbox: the child returned garbage") from error
    return samples, skipped


def _sample(number: int, offset: Any, length: Any, label: Any, name: Any, boxes: Any) -> SampleLocation:
    if min(int(offset), int(length)) < 0:
        raise ValueError("a negative place")
    corners = tuple((float(a), float(b), float(c), float(d)) for a, b, c, d in boxes)
    return SampleLocation(number, int(offset), int(length), int(label), str(name), corners)


def locate_in_child(payload: bytes) -> bytes:
    """Locate the samples of the shard that a call names; runs in the sandbox."""
    call = json.loads(payload)
    path, number, skipped = Path(call["path"]), int(call["number"]), SkippedEntries()
    if call["kind"] == "tar":
        samples = tar_members.locate_samples(path, number, skipped)
    else:
        samples = records.locate_samples(path, number)
    return json.dumps({"samples": [astuple(sample)[1:] for sample in samples], "skipped": skipped.reasons}).encode()
