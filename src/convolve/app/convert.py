"""`convolve convert`: a pickled state dict of another library as a safetensors file."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from convolve.errors import CheckpointError, ConfigError

TIME_LIMIT_SECONDS = 600


@dataclass(frozen=True)
class ConvertReport:
    """What was written."""

    source: Path
    target: Path
    tensors: int
    bytes: int


def run(source: Path, target: Path) -> ConvertReport:
    """Convert in a child process; the target appears only when it is complete."""
    if not source.is_file():
        raise CheckpointError(f"{source}: there is no such file")
    if target.exists():
        raise ConfigError(f"{target}: is there already; give another name, or remove it")
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".convert-") as folder:
            made = Path(folder) / "weights.safetensors"
            tensors = _convert_apart(source, made)
            size = made.stat().st_size
            made.replace(target)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror}; give another place") from None
    return ConvertReport(source, target, tensors, size)


def _convert_apart(source: Path, made: Path) -> int:
    words = [sys.executable, "-m", "convolve.checkpoint.unpickling", str(source), str(made)]
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
