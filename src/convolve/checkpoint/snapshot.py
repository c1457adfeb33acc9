"""The content of a checkpoint, and its files: safetensors for tensors, JSON for the rest, nothing pickled."""

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
    """All that a run is at one step.

    `tensors` has a dictionary for each part ("model", "optimizer", "averages"); a part that a run has not is not there.
    `state` is plain JSON, with the step under "step"; tuples in it come back as lists.
    """

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """The number of weight updates made so far."""
        step = self.state.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise CheckpointError(f"state has step={step!r}: a checkpoint needs a whole number of steps, 0 or more")
        return step


def encode(snapshot: Snapshot) -> dict[str, bytes]:
    """The files of a snapshot by name. Equal snapshots give equal bytes, so that their sha256 can be compared."""
    for part in snapshot.tensors:
        if part not in PARTS:
            raise CheckpointError(f"part {part!r} is not one that a checkpoint holds; {suggest(part, PARTS)}")
    _ = snapshot.step
    files = {PART_FILES[part]: _pack(part, snapshot.tensors[part]) for part in PARTS if part in snapshot.tensors}
    files[STATE_FILE] = _encode_state(snapshot.state)
    return files


def decode(folder: Path, files: Mapping[str, bytes]) -> Snapshot:
    """The snapshot that files hold; `folder` is named when one of them is not what its name says."""
    parts = {part: _unpack(folder / name, files[name]) for part, name in PART_FILES.items() if name in files}
    path = folder / STATE_FILE
    try:
        state = json.loads(files[STATE_FILE])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON ({error}); use another checkpoint") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds {type(state).__name__}, not an object; use another checkpoint")
    snapshot = Snapshot(parts, state)
    try:
        _ = snapshot.step
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; use another checkpoint") from None
    return snapshot


def describe_mismatch(head: bytes, suffix: str) -> str | None:
    """What a file that is no part of a checkpoint really is, when its first bytes or its suffix tell."""
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive, as torch.save writes it, which holds a pickle"
    if head[:1] == b"\x80" or suffix in {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin"}:
        return "a pickle"
    return None


def _pack(part: str, tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes are made here and now, so only what is strided, or shares memory with others, is copied before."""
    places: set[int] = set()
    try:
        return pack_tensors({name: _detach(tensor, places) for name, tensor in tensors.items()})
    except _UNREADABLE as error:
        raise CheckpointError(f"part {part!r} cannot be stored as safetensors: {_one_line(error)}") from error


def _detach(tensor: Tensor, places: set[int]) -> Tensor:
    """The values as safetensors takes them: dense, in memory of the CPU that is not among those taken."""
    dense = tensor.detach().cpu().contiguous()
    place = dense.untyped_storage().data_ptr()
    if place in places:
        return dense.clone()
    places.add(place)
    return dense


def _unpack(path: Path, data: bytes) -> dict[str, Tensor]:
    try:
        return unpack_tensors(data)
    except _UNREADABLE as error:
        foreign = describe_mismatch(data[:8], "")
        what = f"is {foreign}, and pickles are never loaded" if foreign else f"is not safetensors ({_one_line(error)})"
        raise CheckpointError(f"{path}: {what}; use another checkpoint") from None


def _encode_state(state: dict[str, Any]) -> bytes:
    _check_keys(state, "state")
    try:
        return (json.dumps(state, indent=1, sort_keys=True) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"state cannot be stored as JSON: {_one_line(error)}; keep to plain values") from error


def _check_keys(value: object, place: str) -> None:
    """JSON would turn other keys into text without a word, and they would not come back."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{place} has the key {key!r}: keys must be text; use {str(key)!r}")
            _check_keys(inner, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_keys(inner, place)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
