"""Core ML packages (`.mlpackage`, a folder): pixel values [1, H, W, C], float32 from 0 to 255, to logits [1, classes].

Core ML runs on Apple's systems only, so a package is not executed here. It is read back instead: its input, output and
metadata, and the bytes of every weight tensor with at least `MIN_WEIGHTS` elements.
"""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convolve.errors import CheckpointError, ConvolveError, ExtraError, to_one_line
from convolve.inference.engines.onnx import INPUT, OUTPUT
from convolve.inference.metadata import ModelMetadata, read_metadata

SUFFIX = ".mlpackage"
MIN_WEIGHTS = 64
_WEIGHTS_FILE = "weight.bin"


def require_coreml(subject: str) -> None:
    """Raise an error that names the extra if coremltools is not installed."""
    if find_spec("coremltools") is None:
        raise ExtraError(f"{subject} (module coremltools)", "coreml")


@contextmanager
def _quiet_coremltools() -> Iterator[Any]:
    """Yield coremltools without its progress bars and its warnings about untested versions of torch."""
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            import coremltools

            yield coremltools
    finally:
        logger.setLevel(level)


def write_coreml(module: nn.Module, metadata: ModelMetadata, path: Path) -> None:
    """Convert a module from pixels to logits for one image, in fp32, for iOS 17 or macOS 14 and newer."""
    require_coreml("--format coreml")
    channels, height, width = metadata.transform.shape
    program = torch.export.export(module, (torch.zeros(1, height, width, channels),)).run_decompositions({})
    with _quiet_coremltools() as coremltools:
        try:
            model = coremltools.convert(
                program,
                outputs=[coremltools.TensorType(name=OUTPUT)],
                minimum_deployment_target=coremltools.target.iOS17,
                compute_precision=coremltools.precision.FLOAT32,
                skip_model_load=True,
            )
        except Exception as error:  # an operator without a counterpart raises various classes
            reason = to_one_line(f"{type(error).__name__}: {error}")[:200]
            raise ConvolveError(f"--format coreml: cannot convert ({reason}); use --format onnx") from error
        model.user_defined_metadata.update(metadata.to_strings())
        model.save(str(path))


def read_coreml(path: Path) -> ModelMetadata:
    """Return the metadata of a package, after checking its input and output."""
    require_coreml(str(path))
    try:
        with _quiet_coremltools() as coremltools:
            model = coremltools.models.MLModel(str(path), skip_model_load=True)
        description = model.get_spec().description
        metadata = read_metadata(dict(model.user_defined_metadata), path)
    except CheckpointError:
        raise
    except Exception as error:  # coremltools and protobuf raise various classes
        raise CheckpointError(f"{path}: not a readable Core ML package ({to_one_line(error)[:160]})") from None
    channels, height, width = metadata.transform.shape
    found = [(one.name, tuple(one.type.multiArrayType.shape)) for one in (*description.input, *description.output)]
    expected = [(INPUT, (1, height, width, channels)), (OUTPUT, (1, len(metadata.classes)))]
    if found != expected:
        raise CheckpointError(f"{path}: has input and output {found}, not {expected}; export the run again")
    return metadata


def has_weights(path: Path, module: nn.Module) -> bool:
    """Return True if a package contains the weights of a module bit for bit."""
    stored = b"".join(file.read_bytes() for file in sorted(path.rglob(_WEIGHTS_FILE)))
    large = [tensor for tensor in module.state_dict().values() if tensor.numel() >= MIN_WEIGHTS]
    return all(tensor.detach().cpu().contiguous().numpy().tobytes() in stored for tensor in large)
