"""Engines that run an ONNX file: onnxruntime and OpenVINO, which also runs its IR. Neither needs torch.

Both compute in fp32, or in int8 where the file is quantized. OpenVINO would otherwise round to bf16 on CPUs that have
instructions for it. Threads are those of convolve, not those that an engine finds.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

import numpy as np

from convolve.inference.engines.base import Logits, Pixels

INPUT, OUTPUT = "pixels", "logits"


@dataclass(frozen=True)
class OnnxRuntimeEngine:
    """A session of onnxruntime on the CPU."""

    version: str
    session: Any
    name: ClassVar[str] = "onnxruntime"

    @property
    def properties(self) -> dict[str, str]:
        """The metadata entries of the file."""
        found: dict[str, str] = self.session.get_modelmeta().custom_metadata_map
        return found

    def run(self, pixels: Pixels) -> Logits:
        (logits,) = self.session.run([OUTPUT], {INPUT: pixels})
        return np.asarray(logits, np.float32)


def open_onnxruntime(path: Path, threads: int) -> OnnxRuntimeEngine:
    """Open an ONNX file with onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return OnnxRuntimeEngine(onnxruntime.__version__, session)


@dataclass(frozen=True)
class _FixedRequest:
    """A request for one batch size, with arrays that are its input and output."""

    request: Any
    pixels: Pixels
    logits: Logits

    def run(self, pixels: Pixels) -> Logits:
        self.pixels[:] = pixels
        self.request.infer(None, share_outputs=True)
        return self.logits.copy()


@dataclass(frozen=True)
class _FlexibleRequest:
    """A request for any batch size."""

    request: Any

    def run(self, pixels: Pixels) -> Logits:
        results = self.request.infer(pixels, share_inputs=True, share_outputs=True)
        return np.array(results[0], np.float32)


@dataclass(frozen=True)
class OpenVinoEngine:
    """A model of OpenVINO, compiled for one batch size and, on first use, for all others."""

    version: str
    path: Path
    core: Any
    settings: dict[str, Any]
    name: ClassVar[str] = "openvino"
    _requests: dict[int | None, _FixedRequest | _FlexibleRequest] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def compile(self, batch_size: int | None) -> None:
        """Compile for a batch size; None: for any."""
        model = self.core.read_model(str(self.path))
        if batch_size is not None:
            model.reshape([batch_size, *list(model.input(INPUT).partial_shape)[1:]])
        request = self.core.compile_model(model, "CPU", self.settings).create_infer_request()
        self._requests[batch_size] = (
            _FlexibleRequest(request)
            if batch_size is None
            else _FixedRequest(request, request.get_input_tensor(0).data, request.get_output_tensor(0).data)
        )

    def run(self, pixels: Pixels) -> Logits:
        # A request has one set of buffers.
        with self._lock:
            size = len(pixels) if len(pixels) in self._requests else None
            if size not in self._requests:
                self.compile(size)
            return self._requests[size].run(pixels)


@cache
def openvino_core() -> Any:
    """Return the one core of this process.

    Each core installs a signal stack and reinstalls the previous one at its end. If the older of two ends first, a
    stack that was freed remains, and the next signal crashes the process.
    """
    import openvino

    return openvino.Core()


def open_openvino(path: Path, threads: int, batch_size: int | None = None) -> OpenVinoEngine:
    """Open an ONNX file or an OpenVINO IR with OpenVINO, compiled for a batch size; None: for any."""
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    engine = OpenVinoEngine(openvino.__version__.partition("-")[0], path, openvino_core(), settings)
    engine.compile(batch_size)
    return engine
