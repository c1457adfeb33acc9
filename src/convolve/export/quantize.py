"""Eight-bit integers for ONNX files: weights and activations, calibrated on training images.

The arithmetic: q = round(x / scale) + zero with a scale for each output channel of a weight and one for each
activation, taken from the range seen in calibration. Weights use seven bits: CPUs without VNNI add pairs of products in
16 bits, which would overflow with eight, and a file should give the same answers on every machine.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from convolve.export.formats import Pixels, quiet, require_onnx
from convolve.inference.metadata import ModelMetadata

CALIBRATION_IMAGES = 512
CALIBRATION_BATCH = 32


class _Reader:
    """Gives the calibrator one batch after the other."""

    def __init__(self, batches: Sequence[Pixels]) -> None:
        self._batches: Iterator[Pixels] = iter(batches)

    def get_next(self) -> dict[str, Any] | None:
        """The next batch, or None after the last one."""
        batch = next(self._batches, None)
        return None if batch is None else {"pixels": batch}


def quantize(source: Path, target: Path, card: ModelMetadata, images: Pixels) -> None:
    """Write the eight-bit form of an ONNX file, calibrated on the first images given."""
    require_onnx()
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    CalibrationDataReader.register(_Reader)
    chosen = images[:CALIBRATION_IMAGES]
    batches = [chosen[start : start + CALIBRATION_BATCH] for start in range(0, len(chosen), CALIBRATION_BATCH)]
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # the quantizer speaks through the root logger
    try:
        with quiet():
            quantize_static(
                str(source),
                str(target),
                _Reader(batches),
                quant_format=QuantFormat.QDQ,
                per_channel=True,
                reduce_range=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
    finally:
        root.setLevel(level)
    model = onnx.load(str(target))
    onnx.helper.set_model_props(model, card.to_strings())
    onnx.save(model, str(target))
