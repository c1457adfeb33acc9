"""Accelerators as bundles of arithmetic and memory, so that their way of computing can be had anywhere."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceModel:
    """What one named accelerator computes with, and the memory that one of its chips has."""

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
    one.name: one
    for one in (
        DeviceModel(
            "ipu-mk1", "Graphcore IPU, first generation", 300 * 10**6, "16.16", True, False, False, 128.0, "static"
        ),
        DeviceModel(
            "ipu-mk2", "Graphcore IPU, second generation", 900 * 10**6, "16.16", True, False, False, 128.0, "static"
        ),
        DeviceModel("ascend-910", "Huawei Ascend 910", 32 * 1024**3, "16.32", False, True, False, 2.0**32, "ascend"),
    )
}
