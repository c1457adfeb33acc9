"""`convolve convert`: write a pickled state dict of another library as a safetensors file.

This is the only code that opens a pickle. A child process, `python -m convolve.checkpoint.convert SOURCE TARGET`, reads
the file with torch's restricted unpickler (`weights_only=True`: only tensors and plain containers) and writes its
tensors as safetensors. An exploit of the unpickler would run in a short-lived process with limited memory and without
keys in its environment.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from convolve.errors import CheckpointError, ConfigError
from convolve.files import atomic_file, describe_write_error

TIME_LIMIT_SECONDS = 600


@dataclass(frozen=True)
class ConvertReport:
    """Result of a conversion."""

    source: Path
    target: Path
    tensors: int
    bytes: int


def convert(source: Path, target: Path) -> ConvertReport:
    """Convert a file in a child process; `target` appears only when it is complete."""
    if not source.is_file():
        raise CheckpointError(f"{source}: no such file; give a file that torch.save wrote")
    if target.exists():
        raise ConfigError(f"{target}: already exists; choose another name or remove it")
    try:
        with atomic_file(target) as draft:
            tensors = _convert_in_child(source, draft)
            size = draft.stat().st_size
    except OSError as error:
        raise ConfigError(describe_write_error(target, error)) from None
    return ConvertReport(source, target, tensors, size)


def _convert_in_child(source: Path, target: Path) -> int:
    command = [sys.executable, "-m", "convolve.checkpoint.convert", str(source), str(target)]
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH", "HOME", "LANG")}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS, check=False
        )
        result = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{source}: reading took more than {TIME_LIMIT_SECONDS} s; not converted") from None
    except ValueError:
        raise CheckpointError(f"{source}: the reader crashed (exit code {done.returncode}); not converted") from None
    if "error" in result:
        raise CheckpointError(f"{source}: cannot read safely ({result['error']}); not converted")
    return int(result["tensors"])


# Keys under which training scripts save the weights.
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "state_dict_ema", "model_ema", "net", "weights")
MEMORY_FACTOR = 8
MIN_MEMORY_BYTES = 8 << 30


def find_tensors(content: Any) -> dict[str, Tensor]:
    """Return the state dict inside an object that a training script saved."""
    if isinstance(content, Mapping):
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
        for key in STATE_DICT_KEYS:
            if isinstance(content.get(key), Mapping):
                return find_tensors(content[key])
    raise ValueError("contains no dictionary of tensors")


def unpickle(source: Path, target: Path) -> int:
    """Write the tensors of a pickle as safetensors and return their number."""
    tensors = find_tensors(torch.load(source, map_location="cpu", weights_only=True))
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, target)
    return len(tensors)


def main() -> None:
    """Convert, and print the result for the parent process as one line of JSON."""
    source, target = map(Path, sys.argv[1:])
    limit = max(MIN_MEMORY_BYTES, MEMORY_FACTOR * source.stat().st_size)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        result: dict[str, Any] = {"tensors": unpickle(source, target)}
    except Exception as error:
        result = {"error": " ".join(str(error).split())[:300]}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
