"""Content of a checkpoint and its files: safetensors for tensors, JSON for everything else, no pickles."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as unpack_tensors
from torch import Tensor

from convolve.checkpoint.packing import pack
from convolve.errors import CheckpointError, suggest
from convolve.run_files import STATE_FILE

PARTS = ("model", "optimizer", "averages")
PART_FILES = {part: f"{part}.safetensors" for part in PARTS}
FILES = (*PART_FILES.values(), STATE_FILE)
_UNREADABLE = (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, AssertionError)


@dataclass
class Snapshot:
    """State of a run at one step.

    `tensors` has a dictionary for each part ("model", "optimizer", "averages") that the run has. `state` is plain JSON
    with the step under "step"; tuples in it are loaded as lists. `packed` has the bytes to store for some parts.
    """

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    packed: dict[str, bytes] = field(default_factory=dict)

    def copy(self) -> "Snapshot":
        """Return a snapshot that keeps its values: of tensors on the host the bytes to store, of others a clone."""
        packed = {part: _pack(part, named) for part, named in self.tensors.items() if _is_on_host(named)}
        tensors = {
            part: {name: tensor.detach().clone() for name, tensor in named.items()}
            for part, named in self.tensors.items()
            if part not in packed
        }
        return Snapshot(tensors, dict(self.state), packed)

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


def encode(snapshot: Snapshot) -> dict[str, bytes]:
    """Return the files of a snapshot by name. Equal snapshots have equal bytes, so their sha256 can be compared."""
    for part in snapshot.tensors:
        if part not in PARTS:
            raise CheckpointError(f"unknown checkpoint part {part!r}; {suggest(part, PARTS)}")
    _ = snapshot.step
    packed = {part: _pack(part, named) for part, named in snapshot.tensors.items()} | snapshot.packed
    files = {PART_FILES[part]: packed[part] for part in PARTS if part in packed}
    files[STATE_FILE] = _encode_state(snapshot.state)
    return files


def decode(folder: Path, files: Mapping[str, bytes]) -> Snapshot:
    """Parse the files of a snapshot; `folder` is for error messages."""
    parts = {part: _unpack(folder / name, files[name]) for part, name in PART_FILES.items() if name in files}
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
