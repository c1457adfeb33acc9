"""LiteRT (TensorFlow Lite) files: one image at a time, uint8 pixels [1, H, W, C] to float32 logits [1, classes].

litert-torch needs older versions of some packages than convolve, so it runs in another environment, whose Python is
`CONVOLVE_LITERT_PYTHON`. It receives a torch.export archive and returns the file. LiteRT in the same environment runs
the file for verification. The metadata is in a zip archive at the end of the file, where TensorFlow Lite keeps
associated files: `convolve.json`, and `labels.txt` with one class per line.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from convolve.errors import CheckpointError, ConvolveError, to_one_line
from convolve.inference import litert_program
from convolve.inference.engines.base import Logits, Pixels
from convolve.inference.engines.probe import Predictor
from convolve.inference.metadata import METADATA_KEY, ModelMetadata, read_metadata

SUFFIX = ".tflite"
VARIABLE = "CONVOLVE_LITERT_PYTHON"
METADATA_FILE, LABELS_FILE = f"{METADATA_KEY}.json", "labels.txt"
TIME_LIMIT = 1800.0
_MAX_METADATA = 1 << 24


def write_litert(program: torch.export.ExportedProgram, metadata: ModelMetadata, path: Path) -> None:
    """Convert a program for a batch of one image, and add the metadata."""
    python = find_python()
    channels, height, width = metadata.transform.shape
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        source = Path(folder) / "model.pt2"
        torch.export.save(program, source)
        _run(python, "convert", str(source), str(path), str(height), str(width), str(channels))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(METADATA_FILE, metadata.to_json())
        archive.writestr(LABELS_FILE, metadata.to_strings()["classes"] + "\n")


def open_litert(path: Path) -> tuple[Predictor, ModelMetadata]:
    """Return a function that runs the file with LiteRT, image by image, and the metadata."""
    python, metadata = find_python(), read_litert(path)

    def run(pixels: Pixels) -> Logits:
        with tempfile.TemporaryDirectory() as folder:
            inputs, outputs = Path(folder) / "pixels.npy", Path(folder) / "logits.npy"
            np.save(inputs, pixels)
            _run(python, "run", str(path.absolute()), str(inputs), str(outputs))
            return np.asarray(np.load(outputs, allow_pickle=False), np.float32)

    return run, metadata


def read_litert(path: Path) -> ModelMetadata:
    """Return the metadata of a LiteRT file."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(METADATA_FILE) as file:
            text = file.read(_MAX_METADATA).decode()
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise CheckpointError(
            f"{path}: cannot read its metadata ({to_one_line(error)}); export the run again"
        ) from None
    return read_metadata({METADATA_KEY: text}, path)


def find_python() -> str:
    """Return the Python that converts: `CONVOLVE_LITERT_PYTHON`, or this one if litert-torch is installed."""
    named = os.environ.get(VARIABLE)
    if named:
        return named
    if find_spec("litert_torch") is not None:
        return sys.executable
    version = ".".join(torch.__version__.split(".")[:2])
    raise ConvolveError(
        f"--format litert: needs litert-torch, which needs other versions of convolve's packages; make an environment "
        f"(python3 -m venv litert && litert/bin/pip install litert-torch 'torch=={version}.*') and set "
        f"{VARIABLE}=litert/bin/python"
    )


def _run(python: str, *arguments: str) -> None:
    """Run the program in the other environment; it imports nothing from the current folder."""
    problem = f"--format litert: {arguments[0]} failed"
    remedy = f"check the environment of {VARIABLE}, or use --format onnx"
    command = [python, "-I", litert_program.__file__, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
    except OSError as error:
        raise ConvolveError(f"{VARIABLE}={python}: cannot execute ({error.strerror}); {remedy}") from None
    except subprocess.TimeoutExpired:
        raise ConvolveError(f"{problem} (no result after {TIME_LIMIT:g} s); {remedy}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConvolveError(f"{problem} ({to_one_line(last)[:200]}); {remedy}")
