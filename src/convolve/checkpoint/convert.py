"""`convolve convert`: a pickled state dict of another library as a safetensors file.

The one place that opens a pickle: in a process of its own, with torch's restricted reader, for `convolve convert`.

`python -m convolve.checkpoint.convert SOURCE TARGET` reads a file that torch.save wrote, with `weights_only=True`
(nothing but tensors and plain containers can come out of it), and writes its tensors as safetensors. Where the reader
has a hole, it has it in a short-lived process without network clients or keys, whose memory is limited.
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
    """What was written."""

    source: Path
    target: Path
    tensors: int
    bytes: int


def convert(source: Path, target: Path) -> ConvertReport:
    """Convert in a child process; the target appears only when it is complete."""
    if not source.is_file():
        raise CheckpointError(f"{source}: there is no such file")
    if target.exists():
        raise ConfigError(f"{target}: is there already; give another name, or remove it")
    try:
        with atomic_file(target) as draft:
            tensors = _convert_in_child(source, draft)
            size = draft.stat().st_size
    except OSError as error:
        raise ConfigError(describe_write_error(target, error)) from None
    return ConvertReport(source, target, tensors, size)


def _convert_in_child(source: Path, made: Path) -> int:
    words = [sys.executable, "-m", "convolve.checkpoint.convert", str(source), str(made)]
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "PYTHONPATH", "HOME", "LANG")}
    try:
        done = subprocess.run(words, env=kept, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS, check=False)
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{source}: took more than {TIME_LIMIT_SECONDS} s to read; it is not converted") from None
    except ValueError:
        raise CheckpointError(f"{source}: the reader ended without an answer (code {done.returncode})") from None
    if "error" in answer:
        raise CheckpointError(f"{source}: cannot be read safely: {answer['error']}")
    return int(answer["tensors"])


# Where training scripts keep the weights inside what they save.
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "state_dict_ema", "model_ema", "net", "weights")
MEMORY_FACTOR = 8
MEMORY_FLOOR = 8 << 30


def find_tensors(content: Any) -> dict[str, Tensor]:
    """The weights inside what a training script saved."""
    if isinstance(content, Mapping):
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
        for place in STATE_DICT_KEYS:
            if isinstance(content.get(place), Mapping):
                return find_tensors(content[place])
    raise ValueError("it holds no dictionary of tensors")


def unpickle(source: Path, target: Path) -> int:
    """Write the tensors of a pickle as safetensors; returns their number."""
    tensors = find_tensors(torch.load(source, map_location="cpu", weights_only=True))
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, target)
    return len(tensors)


def main() -> None:
    """Convert, and tell the parent what happened in one line of JSON."""
    source, target = map(Path, sys.argv[1:])
    limit = max(MEMORY_FLOOR, MEMORY_FACTOR * source.stat().st_size)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        answer: dict[str, Any] = {"tensors": unpickle(source, target)}
    except Exception as error:
        answer = {"error": " ".join(str(error).split())[:300]}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
