"""Content of a checkpoint and its files: safetensors for tensors, JSON for everything else, no pickles.

A part is one file, `model.safetensors`. If several processes own its tensors, each writes one of several files,
`model-00001-of-00004.safetensors`. Readers join them by the names of the tensors.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from safetensors.torch import load as unpack_tensors
from torch import Tensor

from convolve.checkpoint.packing import pack
from convolve.errors import CheckpointError, suggest
from convolve.run_files import MANIFEST_FILE, STATE_FILE

PARTS = ("model", "optimizer", "averages")
WantsFn = Callable[[str, str], bool]
"""Returns whether to load a tensor, given its part and its name."""
_TENSOR_FILE = re.compile(rf"({'|'.join(PARTS)})(-\d{{5}}-of-\d{{5}})?\.safetensors")
_MAX_HEADER_BYTES = 100_000_000
_UNREADABLE = (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AssertionError)


@dataclass
class Snapshot:
    """State of a run at one step.

    `tensors` has a dictionary for each part ("model", "optimizer", "averages") that the run has. `state` is plain JSON
    with the step under "step"; tuples in it are loaded as lists. `slices` has the number of this process, from 0, and
    the number of processes for each part whose tensors several processes own. `packed` has the bytes to store for some
    parts.
    """

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    slices: dict[str, tuple[int, int]] = field(default_factory=dict)
    packed: dict[str, bytes] = field(default_factory=dict)

    def copy(self) -> "Snapshot":
        """Return a snapshot that keeps its values: of tensors on the host the bytes to store, of others a clone."""
        packed = {part: _pack(part, named) for part, named in self.tensors.items() if _is_on_host(named)}
        tensors = {
            part: {name: tensor.detach().clone() for name, tensor in named.items()}
            for part, named in self.tensors.items()
            if part not in packed
        }
        return Snapshot(tensors, dict(self.state), self.slices, packed)

    def trained(self) -> "Snapshot":
        """Return the snapshot with the weights to use as the model: the average, if that validated better."""
        averages = self.tensors.get("averages", {}) if self.state.get("averaged") is True else {}
        return Snapshot({**self.tensors, "model": {**self.tensors.get("model", {}), **averages}}, self.state)

    @property
    def step(self) -> int:
        """Number of optimizer updates so far."""
        return self.count("step")

    def count(self, key: str, default: int | None = None) -> int:
        """Return an integer of the state, 0 or more; without a default it must be present."""
        value = self.state.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
            raise CheckpointError(f"state has {key}={value!r:.40}: must be an integer, 0 or more")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a finite number of the state."""
        value = self.state.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 2**63:
            raise CheckpointError(f"state has {key}={value!r:.40}: must be a number")
        return float(value)


def part_of(file: str) -> str | None:
    """Return the part whose tensors a file of a checkpoint has; None for other files."""
    match = _TENSOR_FILE.fullmatch(file)
    return match[1] if match else None


def is_slice(file: str) -> bool:
    """Return True for a file with the tensors of one of several processes."""
    match = _TENSOR_FILE.fullmatch(file)
    return match is not None and match[2] is not None


def is_checkpoint_file(name: str) -> bool:
    """Return True for the names of files in a checkpoint."""
    return name in (STATE_FILE, MANIFEST_FILE) or part_of(name) is not None


def _file_of(part: str, number: int, count: int) -> str:
    return f"{part}.safetensors" if count == 1 else f"{part}-{number + 1:05d}-of-{count:05d}.safetensors"


def encode(snapshot: Snapshot) -> dict[str, bytes]:
    """Return the files of a snapshot by name. Equal snapshots have equal bytes, so their sha256 can be compared."""
    for part in (*snapshot.tensors, *snapshot.packed):
        if part not in PARTS:
            raise CheckpointError(f"unknown checkpoint part {part!r}; {suggest(part, PARTS)}")
    _ = snapshot.step
    packed = {part: _pack(part, named) for part, named in snapshot.tensors.items()} | snapshot.packed
    files = {_file_of(part, *snapshot.slices.get(part, (0, 1))): packed[part] for part in PARTS if part in packed}
    files[STATE_FILE] = _encode_state(snapshot.state)
    return files


def decode(folder: Path, files: Mapping[str, bytes]) -> Snapshot:
    """Parse the files of a snapshot; `folder` is for error messages."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name in sorted(files):
        if part := part_of(name):
            parts.setdefault(part, {}).update(_unpack(folder / name, files[name]))
    path = folder / STATE_FILE
    try:
        state = json.loads(files[STATE_FILE])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({error}); use another checkpoint") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: contains {type(state).__name__}, not an object; use another checkpoint")
    snapshot = Snapshot(parts, state)
    try:
        _ = snapshot.step
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; use another checkpoint") from None
    return snapshot


def read_tensors(file: BinaryIO, wants: Callable[[str], bool]) -> bytes:
    """Return the wanted tensors of a safetensors file as such a file; only the header and these tensors are read.

    A file with an invalid header is returned whole, for `decode` to report.
    """
    size = int.from_bytes(file.read(8), "little")
    with suppress(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        header = json.loads(file.read(min(size, _MAX_HEADER_BYTES)))
        names = [name for name in header if name != "__metadata__"]
        entries = {name: header[name] for name in names if wants(name)}
        if len(entries) < len(names):
            return _join(entries, _read_ranges(file, 8 + size, [entry["data_offsets"] for entry in entries.values()]))
    file.seek(0)
    return file.read()


def _read_ranges(file: BinaryIO, start: int, ranges: list[list[int]]) -> list[bytes]:
    """Return the bytes of ranges after `start`; together they may not have more than the file."""
    size = os.fstat(file.fileno()).st_size - start
    if not all(0 <= begin <= end for begin, end in ranges) or sum(end - begin for begin, end in ranges) > size:
        raise ValueError("tensors outside the file")
    data = []
    for begin, end in ranges:
        file.seek(start + begin)
        data.append(file.read(end - begin))
    return data


def _join(entries: dict[str, dict[str, Any]], data: list[bytes]) -> bytes:
    """Return a safetensors file with these entries, whose offsets are replaced."""
    end, moved = 0, {}
    for (name, entry), content in zip(entries.items(), data, strict=True):
        moved[name] = {**entry, "data_offsets": [end, end + len(content)]}
        end += len(content)
    header = json.dumps(moved).encode()
    return b"".join((len(header).to_bytes(8, "little"), header, *data))


def describe_mismatch(head: bytes, suffix: str) -> str | None:
    """Identify a pickle by its first bytes or its suffix; None for other files."""
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive, as torch.save writes it, which contains a pickle"
    if head[:1] == b"\x80" or suffix in {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin"}:
        return "a pickle"
    return None


def _pack(part: str, tensors: Mapping[str, Tensor]) -> bytes:
    try:
        return pack(tensors)
    except _UNREADABLE as error:
        raise CheckpointError(f"part {part!r} cannot be stored as safetensors: {_one_line(error)}") from error


def _is_on_host(tensors: Mapping[str, Tensor]) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors.values())


def _unpack(path: Path, data: bytes) -> dict[str, Tensor]:
    try:
        return unpack_tensors(data)
    except _UNREADABLE as error:
        mismatch = describe_mismatch(data[:8], "")
        problem = f"is {mismatch}; pickles are never loaded" if mismatch else f"is not safetensors ({_one_line(error)})"
        raise CheckpointError(f"{path}: {problem}; use another checkpoint") from None


def _encode_state(state: dict[str, Any]) -> bytes:
    _check_keys(state, "state")
    try:
        return (json.dumps(state, indent=1, sort_keys=True) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"state cannot be stored as JSON: {_one_line(error)}; use plain values only") from error


def _check_keys(value: object, where: str) -> None:
    """Reject keys that are not strings: JSON converts them silently, and they would be loaded as strings."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}: keys must be strings; use {str(key)!r}")
            _check_keys(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_keys(inner, where)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
