"""Quantize ONNX files to int8: weights and activations, calibrated on training images.

The arithmetic: q = round(x / scale) + zero, with one scale per output channel of a weight and one per activation, from
the range seen in calibration. Weights use seven bits: CPUs without VNNI sum pairs of products in 16 bits, which would
overflow with eight bits, and a file should give the same predictions on every machine.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from convolve.inference.engines.base import Pixels
from convolve.inference.formats import quiet, require_onnx
from convolve.inference.metadata import ModelMetadata

CALIBRATION_IMAGES = 512
CALIBRATION_BATCH = 32


class _CalibrationReader:
    def __init__(self, batches: Sequence[Pixels]) -> None:
        self._batches: Iterator[Pixels] = iter(batches)

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self._batches, None)
        return None if batch is None else {"pixels": batch}


def quantize(source: Path, target: Path, metadata: ModelMetadata, images: Pixels) -> None:
    """Write the int8 version of an ONNX file, calibrated on the first `CALIBRATION_IMAGES` images."""
    require_onnx()
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    CalibrationDataReader.register(_CalibrationReader)
    images = images[:CALIBRATION_IMAGES]
    batches = [images[start : start + CALIBRATION_BATCH] for start in range(0, len(images), CALIBRATION_BATCH)]
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # the quantizer logs to the root logger
    try:
        with quiet():
            quantize_static(
                str(source),
                str(target),
                _CalibrationReader(batches),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                reduce_range=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
    finally:
        root.setLevel(level)
    set_metadata(target, metadata)


def set_metadata(path: Path, metadata: ModelMetadata) -> None:
    """Replace the metadata of an ONNX file."""
    import onnx

    model = onnx.load(str(path))
    onnx.helper.set_model_props(model, metadata.to_strings())
    onnx.save(model, str(path))
