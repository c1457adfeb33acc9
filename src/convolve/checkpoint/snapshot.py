"""Content of a checkpoint and its files: safetensors for tensors, JSON for everything else, no pickles."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as unpack_tensors
from safetensors.torch import save as pack_tensors
from torch import Tensor

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
    with the step under "step"; tuples in it are loaded as lists.
    """

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]

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
    files = {PART_FILES[part]: _pack(part, snapshot.tensors[part]) for part in PARTS if part in snapshot.tensors}
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
    """Encode tensors; only those that are strided or share memory are copied."""
    pointers: set[int] = set()
    try:
        return pack_tensors({name: _detach(tensor, pointers) for name, tensor in tensors.items()})
    except _UNREADABLE as error:
        raise CheckpointError(f"part {part!r} cannot be stored as safetensors: {_one_line(error)}") from error


def _detach(tensor: Tensor, pointers: set[int]) -> Tensor:
    """Return a dense CPU tensor whose memory is not in `pointers`, as safetensors requires; add its pointer."""
    dense = tensor.detach().cpu().contiguous()
    pointer = dense.untyped_storage().data_ptr()
    if pointer in pointers:
        return dense.clone()
    pointers.add(pointer)
    return dense


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
