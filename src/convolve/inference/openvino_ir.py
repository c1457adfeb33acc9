"""OpenVINO IR: a graph in `NAME.xml` and its weights in `NAME.bin`, made from an ONNX file. Torch is not imported.

The graph contains the model's metadata and the sha256 of the weights, so files of different exports are not combined.
Of OpenVINO, only functions that read, save, compile and run a model are called; its converters report their use.
"""

from __future__ import annotations

from pathlib import Path

from convolve.errors import CheckpointError, ExtraError, to_one_line
from convolve.files import file_sha256
from convolve.inference.engines.base import is_installed
from convolve.inference.engines.onnx import OpenVinoEngine, open_openvino, openvino_core
from convolve.inference.metadata import METADATA_KEY, ModelMetadata, read_metadata

SUFFIX, WEIGHTS_SUFFIX = ".xml", ".bin"
_METADATA = [METADATA_KEY, "metadata"]
_SHA256 = [METADATA_KEY, "weights_sha256"]


def write_ir(onnx_file: Path, metadata: ModelMetadata, path: Path) -> None:
    """Convert an ONNX file. The weights are written beside `path`."""
    require_openvino("--format openvino")
    import openvino

    model = openvino_core().read_model(str(onnx_file))
    openvino.save_model(model, str(path), compress_to_fp16=False)
    model.set_rt_info(metadata.to_json(), _METADATA)
    model.set_rt_info(file_sha256(weights_of(path)), _SHA256)
    openvino.save_model(model, str(path), compress_to_fp16=False)


def open_ir(path: Path, threads: int, batch_size: int | None = None) -> OpenVinoEngine:
    """Open an IR that `read_ir` has accepted."""
    return open_openvino(path, threads, batch_size)


def read_ir(path: Path) -> ModelMetadata:
    """Return the metadata of an IR after comparing the sha256 of its weights."""
    require_openvino(str(path))
    weights = weights_of(path)
    for file in (path, weights):
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file; an OpenVINO model is {path.name} with {weights.name}")
    try:
        model = openvino_core().read_model(str(path))
        keys = [key for key in (_METADATA, _SHA256) if model.has_rt_info(key)]
        stored = {key[-1]: str(model.get_rt_info(key).value) for key in keys}
    except Exception as error:  # OpenVINO raises RuntimeError and others
        raise CheckpointError(f"{path}: not a readable OpenVINO model ({to_one_line(error)[:160]})") from None
    metadata = read_metadata({METADATA_KEY: stored.get(_METADATA[-1], "")}, path)
    if stored.get(_SHA256[-1]) != file_sha256(weights):
        raise CheckpointError(f"{weights}: not the weights of {path.name}; export the run again")
    return metadata


def weights_of(path: Path) -> Path:
    """Return the file with the weights of an IR."""
    return path.with_suffix(WEIGHTS_SUFFIX)


def require_openvino(subject: str) -> None:
    """Raise an error that names the extra if OpenVINO is not installed."""
    if not is_installed("openvino"):
        raise ExtraError(f"{subject} (module openvino)", "openvino")
