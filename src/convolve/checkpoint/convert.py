"""`convolve convert`: write a pickled state dict of another library as a safetensors file.

This is the only code that opens a pickle. It does so in a sandbox: the child inherits the two open files, reads one of
them with torch's restricted unpickler (`weights_only=True`: only tensors and plain containers), and writes the tensors
to the other as safetensors. An exploit of the unpickler would find no network, no files and no processes.

A pickle of a kilobyte can describe gigabytes (tensors that share or repeat their storage), so the tensors may take at
most a few times the size of the file.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convolve.confinement import Limits
from convolve.errors import CheckpointError, ConfigError, SandboxError
from convolve.files import atomic_file, describe_write_error
from convolve.sandbox import Sandbox

# Keys under which training scripts save the weights.
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "state_dict_ema", "model_ema", "net", "weights")
MAX_EXPANSION = 4
SLACK_BYTES = 1 << 20
MIN_MEMORY_BYTES = 2 << 30
TIME_LIMIT_SECONDS = 600.0
_FOREIGN_CLASS = re.compile(r"Unsupported (?:global|class)[^A-Za-z]*(?:GLOBAL )?([\w.]+)")


@dataclass(frozen=True)
class ConvertReport:
    """Result of a conversion."""

    source: Path
    target: Path
    tensors: int
    bytes: int


def convert(source: Path, target: Path) -> ConvertReport:
    """Convert a file in a sandbox; `target` appears only when it is complete."""
    if not source.is_file():
        raise CheckpointError(f"{source}: no such file; give a file that torch.save wrote")
    if target.exists():
        raise ConfigError(f"{target}: already exists; choose another name or remove it")
    try:
        with atomic_file(target) as draft, source.open("rb") as reader, draft.open("wb") as writer:
            tensors = _convert_in_sandbox(source, reader.fileno(), writer.fileno())
            size = os.fstat(writer.fileno()).st_size
    except OSError as error:
        raise ConfigError(describe_write_error(target, error)) from None
    return ConvertReport(source, target, tensors, size)


def _convert_in_sandbox(source: Path, reader: int, writer: int) -> int:
    limit = MAX_EXPANSION * os.fstat(reader).st_size + SLACK_BYTES
    limits = Limits(max(MIN_MEMORY_BYTES, 4 * limit), file_bytes=limit, seconds=TIME_LIMIT_SECONDS)
    call = json.dumps({"reader": reader, "writer": writer, "limit": limit}).encode()
    with Sandbox("convolve.checkpoint.convert:unpickle", limits, descriptors=(reader, writer)) as sandbox:
        try:
            return int(sandbox.call(call))
        except SandboxError as error:
            raise CheckpointError(f"{source}: cannot read safely ({error.problem}); not converted") from None


def unpickle(payload: bytes) -> bytes:
    """Write the tensors of an open pickle to another open file as safetensors and return their number."""
    import torch
    from safetensors.torch import save

    call = json.loads(payload)
    try:
        with os.fdopen(call["reader"], "rb") as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise SandboxError(_explain(str(error))) from None
    tensors = find_tensors(content)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if size > call["limit"]:
        raise SandboxError(f"its tensors take {size} bytes, many times the size of the file")
    data = memoryview(save({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}))
    while data:
        data = data[os.write(call["writer"], data) :]
    return str(len(tensors)).encode()


def _explain(message: str) -> str:
    """Return what is wrong with a file, without torch's advice to load it unsafely."""
    foreign = _FOREIGN_CLASS.search(message)
    if foreign:
        return f"it contains {foreign[1]}, not only tensors and plain containers"
    return "it is damaged, or not a file of tensors that torch.save wrote"


def find_tensors(content: Any) -> "dict[str, Any]":
    """Return the state dict inside an object that a training script saved."""
    from torch import Tensor

    if isinstance(content, Mapping):
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
        for key in STATE_DICT_KEYS:
            if isinstance(content.get(key), Mapping):
                return find_tensors(content[key])
    raise SandboxError("it contains no dictionary of tensors")
