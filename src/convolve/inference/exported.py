"""Engines of an exported ONNX file or OpenVINO IR. Torch is not imported, so a server of one starts within seconds.

A quantized file may run only on engines whose accuracy was measured when it was exported: each rounds differently, so
their logits differ by more than the tolerance of fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from convolve.errors import CheckpointError, ConfigError, ExtraError, to_one_line
from convolve.files import file_sha256
from convolve.inference.engines.base import Engine, is_installed
from convolve.inference.engines.factory import EngineSource
from convolve.inference.engines.onnx import OnnxRuntimeEngine, open_onnxruntime, open_openvino
from convolve.inference.engines.probe import INT8_TOLERANCE, TOLERANCE, Predictor
from convolve.inference.metadata import ModelMetadata, read_metadata
from convolve.inference.openvino_ir import open_ir, read_ir

ONNX_ENGINES = ("onnxruntime", "openvino")


@dataclass(frozen=True, kw_only=True)
class _ExportedFile:
    """What the sources share; `_opened` has an engine for each batch size."""

    path: Path
    threads: int
    metadata: ModelMetadata
    _opened: dict[int | None, Engine] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.path.name

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.metadata.transform.shape

    @cached_property
    def structure(self) -> str:
        return file_sha256(self.path)


@dataclass(frozen=True, kw_only=True)
class OnnxSource(_ExportedFile):
    """An ONNX file as the source of engines; onnxruntime is the one that the others are compared with."""

    session: OnnxRuntimeEngine

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self.metadata.quantization is None else INT8_TOLERANCE

    @property
    def names(self) -> tuple[str, ...]:
        return ONNX_ENGINES

    @property
    def quick_names(self) -> tuple[str, ...]:
        measured = self.metadata.quantization
        return tuple(name for name in ONNX_ENGINES if measured is None or name in measured["accuracies"])

    def reference(self) -> Predictor:
        return self.session.run

    def open(self, name: str, batch_size: int | None) -> Engine:
        if name == self.session.name:
            return self.session
        if name not in self.quick_names:
            raise ConfigError(
                f"--engine {name}: accuracy of {self.path} was not measured with it; install it, then export again"
            )
        if batch_size not in self._opened:
            self._opened[batch_size] = open_openvino(self.path, self.threads, batch_size)
        return self._opened[batch_size]


def open_onnx_file(path: Path, threads: int) -> OnnxSource:
    """Open an exported ONNX file and read its metadata."""
    if not is_installed("onnxruntime"):
        raise ExtraError(f"{path} (module onnxruntime)", "export")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; give a run folder or an exported ONNX file")
    try:
        session = open_onnxruntime(path, threads)
    except Exception as error:  # onnxruntime raises its own classes
        raise CheckpointError(f"{path}: not a readable ONNX file ({to_one_line(error)[:160]})") from None
    metadata = read_metadata(session.properties, path)
    return OnnxSource(path=path, threads=threads, metadata=metadata, session=session)


@dataclass(frozen=True, kw_only=True)
class IrSource(_ExportedFile):
    """An OpenVINO IR as the source of engines; only OpenVINO runs it."""

    names: tuple[str, ...] = ("openvino",)
    quick_names: tuple[str, ...] = ("openvino",)
    tolerance: float = TOLERANCE

    def reference(self) -> Predictor:
        return self.open(self.names[0], None).run

    def open(self, name: str, batch_size: int | None) -> Engine:
        if batch_size not in self._opened:
            self._opened[batch_size] = open_ir(self.path, self.threads, batch_size)
        return self._opened[batch_size]


def open_ir_file(path: Path, threads: int) -> IrSource:
    """Open an exported OpenVINO IR and read its metadata."""
    return IrSource(path=path, threads=threads, metadata=read_ir(path))


_OPENERS: dict[str, Callable[[Path, int], EngineSource]] = {".onnx": open_onnx_file, ".xml": open_ir_file}


def is_exported(path: Path) -> bool:
    """Return True for the name of an exported file that runs without torch."""
    return path.suffix in _OPENERS


def open_exported(path: Path, threads: int) -> EngineSource:
    """Open an exported file by its suffix."""
    return _OPENERS[path.suffix](path, threads)
