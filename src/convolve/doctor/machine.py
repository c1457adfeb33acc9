"""What works on this machine and what does not."""

import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

from convolve import __version__, device
from convolve.inference.engines.base import ENGINES, is_installed
from convolve.kernels import binding, build, jpeg_region
from convolve.loggers.base import Console

if TYPE_CHECKING:
    from convolve.doctor.device_test import DeviceTest

EXTRAS = {
    "logs": ("tensorboard", "wandb"),
    "export": ("onnx", "onnxruntime", "onnxscript"),
    "openvino": ("onnx", "onnxruntime", "onnxscript", "openvino"),
    "coreml": ("coremltools",),
    "hub": ("huggingface_hub",),
    "ray": ("ray",),
    "serve": ("starlette", "uvicorn", "httptools", *(() if sys.platform == "win32" else ("uvloop",))),
}

# Native code: C files and compiler options.
NATIVE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "layers": (("batch_norm.c", "conv_pool.c", "depthwise.c", "winograd.c"), binding.OPTIONS),
    "pictures": (("jpeg.c", "jpeg_region.c", "resize.c"), ()),
    "number formats": (("rounding.c",), ()),
    "half partials": (("half_partials.c",), binding.OPTIONS),
    "checksums": (("checksum.c",), ()),
}

PROBES = [(operation, kind) for kind in ("float32", "bfloat16", "float16") for operation in ("matmul", "convolution")]


@dataclass(frozen=True)
class DoctorReport:
    """Properties of the machine, tested where possible."""

    versions: dict[str, str]
    devices: list[str]
    cpu: str
    threads: int
    memory_bytes: int
    cache: str
    amx: str
    isa_limit: str | None
    abilities: list[device.Capability]
    native: dict[str, str]
    extras: dict[str, bool]
    engines: dict[str, bool]
    device_test: "DeviceTest | None" = None


def run(console: Console) -> DoctorReport:
    """Probe the machine; operations that could kill the process run in child processes."""
    broken = device.amx_is_broken()
    abilities = []
    for number, (operation, kind) in enumerate(PROBES):
        console.progress(f"probe {operation} {kind}", number, len(PROBES))
        abilities.append(device.probe(operation, kind, limited=broken))
    console.progress("native code", len(PROBES), len(PROBES))
    return DoctorReport(
        versions={
            "convolve": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "numpy", "safetensors", "pillow", "pydantic")},
        },
        devices=device.available(),
        cpu=device.cpu_name(),
        threads=device.available_threads(),
        memory_bytes=device.memory_bytes(),
        cache=str(device.cache_folder()),
        amx=_amx(broken),
        isa_limit=os.environ.get(device.ISA_LIMIT),
        abilities=abilities,
        native={what: _try_native(files, options) for what, (files, options) in NATIVE.items()}
        | {"JPEG regions": describe_regions(jpeg_region.load())},
        extras={extra: all(find_spec(module) for module in modules) for extra, modules in EXTRAS.items()},
        engines={engine: is_installed(engine) for engine in ENGINES},
    )


def _try_native(files: tuple[str, ...], options: tuple[str, ...]) -> str:
    """Compile C files that are not cached. Return "compiled", or the reasons of a failure."""
    results = [build.load(file, options) for file in files]
    reasons = dict.fromkeys(result.reason for result in results if isinstance(result, build.Unavailable))
    return "; ".join(reasons) or "compiled"


def describe_regions(decode: jpeg_region.RegionDecoder | build.Unavailable) -> str:
    """Return whether the regions of JPEGs that a crop needs are decoded alone, which also takes a libjpeg-turbo."""
    return f"whole images are decoded; {decode.reason}" if isinstance(decode, build.Unavailable) else "decoded alone"


def _amx(broken: bool) -> str:
    if broken:
        return "advertised, but using it kills the process; avoided"
    return "works" if "amx_tile" in device.cpu_flags() else "not there"
