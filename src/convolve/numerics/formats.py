"""Number formats with their range and spacing, and the arithmetic of named accelerators.

A binary format with e exponent bits and m stored mantissa bits has, with bias b = 2^(e-1) - 1,

    largest value       (2 - 2^-m) * 2^b
    smallest normal     2^(1-b)
    smallest subnormal  2^(1-b-m)          which is also the spacing of all values below twice the smallest normal

A device model bundles the number formats, rounding and memory of an accelerator, so any machine can emulate it.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """One binary floating-point format."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    dtype: torch.dtype

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """Return the exponent bias, which is also the largest exponent."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def largest(self) -> float:
        return (2.0 - 2.0**-self.mantissa_bits) * 2.0**self.bias

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """Return the smallest subnormal value."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)


FP32 = Format("fp32", 8, 23, torch.float32)
FP16 = Format("fp16", 5, 10, torch.float16)
BF16 = Format("bf16", 8, 7, torch.bfloat16)
FORMATS = {format.name: format for format in (FP32, FP16, BF16)}


@dataclass(frozen=True)
class DeviceModel:
    """Arithmetic of a named accelerator, and the memory of one of its chips."""

    name: str
    summary: str
    memory_bytes: int
    precision: str
    stochastic_rounding: bool
    saturate_on_overflow: bool
    enable_half_partials: bool
    loss_scaling: float
    loss_scaling_rule: str


DEVICE_MODELS = {
    model.name: model
    for model in (
        DeviceModel(
            "ipu-mk1", "Graphcore IPU, first generation", 300 * 10**6, "16.16", True, False, False, 128.0, "static"
        ),
        DeviceModel(
            "ipu-mk2", "Graphcore IPU, second generation", 900 * 10**6, "16.16", True, False, False, 128.0, "static"
        ),
        DeviceModel("ascend-910", "Huawei Ascend 910", 32 * 1024**3, "16.32", False, True, False, 2.0**32, "ascend"),
    )
}
