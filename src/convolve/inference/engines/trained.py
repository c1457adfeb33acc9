"""Engines of a trained model. Exports and compiled packages are kept in a private folder of the cache.

The name of a cached file contains a hash of the model and of the versions that wrote it, and the sha256 of its bytes,
which is compared before it is opened (`directory.find_intact`). After that, `factory` compares its logits with the
model.
"""

import hashlib
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from convolve import __version__, device
from convolve.data.transforms.normalize import Transform
from convolve.directory import find_intact, private_folder
from convolve.files import file_sha256, publish
from convolve.inference.engines.base import COMPILED_FOR_SIZE, ENGINES, Engine, Logits, Pixels
from convolve.inference.engines.choice import CACHE_KIND
from convolve.inference.engines.onnx import open_onnxruntime, open_openvino
from convolve.inference.engines.probe import TOLERANCE, Predictor
from convolve.inference.formats import ExportModule, open_export, trust_package, write_export
from convolve.inference.metadata import ModelMetadata
from convolve.layers.fold import fold_batch_norms
from convolve.models.network import Network

_SUFFIXES = {"onnx": ".onnx", "aoti": ".pt2"}
_WRITERS = {"onnx": ("torch", "onnx", "onnxscript"), "aoti": ("torch",)}


class TorchEngine:
    """A model with folded batch norms and weights in channels-last order, as its inputs are, on any device."""

    name: ClassVar[str] = "torch"
    version: ClassVar[str] = torch.__version__

    def __init__(self, model: nn.Module, transform: Transform) -> None:
        self._model = model
        self._transform = transform
        self._device = next(model.parameters()).device

    def run(self, pixels: Pixels) -> Logits:
        with torch.inference_mode():
            images = self._transform(torch.from_numpy(pixels).to(self._device))
            return np.asarray(self._model(images).float().cpu())


@dataclass(frozen=True)
class PredictorEngine:
    """A program of torch: machine code of AOTInductor for this CPU, or an archive of torch.export."""

    name: str
    predictor: Predictor
    version: ClassVar[str] = torch.__version__

    def run(self, pixels: Pixels) -> Logits:
        return self.predictor(pixels)


@dataclass(frozen=True)
class TrainedSource:
    """A trained model as the source of engines. Those other than torch run on the CPU only."""

    model: Network
    metadata: ModelMetadata
    threads: int
    _opened: dict[tuple[str, int | None], Engine] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.metadata.model

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.metadata.transform.shape

    @property
    def tolerance(self) -> float:
        return TOLERANCE

    @property
    def names(self) -> tuple[str, ...]:
        return ENGINES if next(self.model.parameters()).device.type == "cpu" else ENGINES[:1]

    @property
    def quick_names(self) -> tuple[str, ...]:
        """Return all names, but `aoti` only if it is already compiled: that takes half a minute."""
        compiled = len(self.names) > 1 and find_intact(*self._cached("aoti")) is not None
        return tuple(name for name in self.names if name != "aoti" or compiled)

    @property
    def structure(self) -> str:
        return hashlib.sha256(f"{self.label} {self.model!r} {self.shape}".encode()).hexdigest()

    @cached_property
    def folded(self) -> Network:
        """The model with folded batch norms."""
        return fold_batch_norms(self.model).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def reference(self) -> Predictor:
        return TorchEngine(self.model, self.metadata.transform).run

    def open(self, name: str, batch_size: int | None) -> Engine:
        key = (name, batch_size if name in COMPILED_FOR_SIZE else None)
        if key not in self._opened:
            self._opened[key] = self._open(*key)
        return self._opened[key]

    def _open(self, name: str, batch_size: int | None) -> Engine:
        if name == "torch":
            return TorchEngine(self.folded, self.metadata.transform)
        if name == "aoti":
            path = self._write("aoti")
            trust_package(path)
            return PredictorEngine("aoti", open_export("aoti", path)[0])
        path = self._write("onnx")
        if name == "openvino":
            return open_openvino(path, self.threads, batch_size)
        return open_onnxruntime(path, self.threads)

    def _write(self, format_name: str) -> Path:
        """Return the cached export in a format, and write it first if there is none."""
        folder, name, suffix = self._cached(format_name)
        path = find_intact(folder, name, suffix)
        if path is not None:
            return path
        with tempfile.TemporaryDirectory(prefix=f".tmp-{name}-", dir=folder, ignore_cleanup_errors=True) as temporary:
            draft = Path(temporary) / f"{name}{suffix}"
            write_export(format_name, self._module(), self.metadata, draft)
            draft.chmod(0o600)
            path = folder / f"{name}-{file_sha256(draft)}{suffix}"
            publish(draft, path)
        return path

    def _module(self) -> ExportModule:
        return ExportModule(self.folded, self.metadata.transform)

    def _cached(self, format_name: str) -> tuple[Path, str, str]:
        """Return folder, name and suffix of the cached export."""
        folder = private_folder(device.cache_folder(), CACHE_KIND)
        return folder, f"{format_name}-{self._content(format_name)}", _SUFFIXES[format_name]

    def _content(self, format_name: str) -> str:
        """Hash everything that an export depends on; machine code also depends on the CPU and its threads."""
        versions = [__version__, *(f"{name} {metadata.version(name)}" for name in _WRITERS[format_name])]
        machine = [device.cpu_name(), *sorted(device.cpu_flags()), str(self.threads)] if format_name == "aoti" else []
        parts = [self.structure, self.metadata.to_json(), self._weights, *versions, *machine]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @cached_property
    def _weights(self) -> str:
        """Hash of the weights."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()
