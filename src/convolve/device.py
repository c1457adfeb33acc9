"""Devices, CPU capabilities, threads and memory of this machine.

Kinds of accelerators are those of torch or registered with it (`torch.accelerator`); no file names them.

CPU flags are not reliable. Some virtual machines advertise AMX, and a bf16 matmul that uses it ends the process with an
illegal instruction, which cannot be caught. So capabilities are found by running the operation in a child process. The
result is cached per machine, and a limit for oneDNN is set before torch is imported: this module imports torch inside
functions only.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from convolve.errors import ConvolveError, DeviceError, DeviceFailedError, DeviceMemoryError, to_one_line
from convolve.files import atomic_file
from convolve.interpreter import code_arguments

if TYPE_CHECKING:
    import torch


ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
SAFE_ISA = "AVX512_CORE_FP16"
ASSUMED_MEMORY = 4 << 30
# CPUs without them convert every operand, so their 16-bit kernels are no faster than fp32.
CPU_FLAGS_16_BITS = {
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
    "bf16": {"avx512_bf16", "avx_ne_convert", "amx_bf16", "bf16"},
}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_PROBE = """
import sys, time, torch
operation, kind = sys.argv[1], getattr(torch, sys.argv[2])
if operation == "matmul":
    a = torch.randn(256, 256).to(kind); work = lambda: a @ a; flop = 2 * 256**3
else:
    x = torch.randn(8, 32, 28, 28).to(kind).requires_grad_(); w = torch.randn(32, 32, 3, 3).to(kind).requires_grad_()
    work = lambda: torch.nn.functional.conv2d(x, w, padding=1).sum().backward(); flop = 6 * 8 * 32 * 32 * 9 * 28 * 28
work(); best = 9e9; end = time.perf_counter() + 0.3
while time.perf_counter() < end:
    start = time.perf_counter(); work(); best = min(best, time.perf_counter() - start)
print(flop / best / 1e9)
"""


@dataclass(frozen=True)
class Capability:
    """Result of a probe: one operation in one number format on this CPU."""

    operation: str
    number_format: str
    works: bool
    gflops: float
    limited: bool


def cache_folder() -> Path:
    """Return the folder of everything that can be recreated: data sets, compiled kernels, probe results."""
    folder = os.environ.get("CONVOLVE_CACHE")
    if folder:
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "convolve"


def _cpu_text() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return text.partition("\n\n")[0]


def cpu_flags(cpu_info: str | None = None) -> set[str]:
    """Return the flags that the CPU advertises (`Features` on ARM), not all of which have to work."""
    lines = (_cpu_text() if cpu_info is None else cpu_info).splitlines()
    line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return set(line.partition(":")[2].split())


def cpu_name() -> str:
    """Return the model name of the CPU."""
    line = next((line for line in _cpu_text().splitlines() if line.startswith("model name")), "")
    return line.partition(":")[2].strip() or platform.processor() or platform.machine()


def _probe_file() -> Path:
    parts = [cpu_name(), *sorted(cpu_flags()), metadata.version("torch"), platform.release()]
    return cache_folder() / f"cpu-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}.json"


def _read_probes() -> dict[str, dict[str, object]]:
    try:
        known = json.loads(_probe_file().read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _store_probe(name: str, capability: Capability) -> None:
    file = _probe_file()
    # Without a writable cache the probe runs again next time; nothing else depends on it.
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_file(file) as draft:
            draft.write_text(json.dumps({**_read_probes(), name: asdict(capability)}))


def probe(operation: str, number_format: str, *, limited: bool) -> Capability:
    """Run one operation in a child process, or return its cached result. A child that dies means it does not work."""
    name = f"{operation}-{number_format}-{'limited' if limited else 'free'}"
    known = _read_probes().get(name)
    if known is not None:
        return Capability(**known)  # type: ignore[arg-type]
    environment = {key: value for key, value in os.environ.items() if key != ISA_LIMIT}
    if limited:
        environment[ISA_LIMIT] = SAFE_ISA
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *code_arguments(_PROBE, operation, number_format)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    works = done.returncode == 0
    capability = Capability(operation, number_format, works, float(done.stdout) if works else 0.0, limited)
    _store_probe(name, capability)
    return capability


def amx_is_broken() -> bool:
    """Return True if the CPU advertises AMX, but using it kills the process."""
    return "amx_tile" in cpu_flags() and not probe("matmul", "bfloat16", limited=False).works


def prepare() -> None:
    """Configure oneDNN and malloc for this process. Call before importing torch.

    Keeps ONEDNN_MAX_CPU_ISA if it is set.
    """
    if ISA_LIMIT not in os.environ and amx_is_broken():
        os.environ[ISA_LIMIT] = SAFE_ISA
    _keep_memory()


def _keep_memory() -> None:
    """Make glibc keep freed blocks: the steps of a small model would otherwise spend their time in page faults."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def available_threads() -> int:
    """Return the CPU threads for this process: OMP_NUM_THREADS, else affinity and the quota of the control group."""
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    return available_cores()


def available_cores() -> int:
    """Return the CPU cores for this process: its affinity and the quota of the control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def memory_bytes() -> int:
    """Return the memory of the machine, or of the control group if that is less; a guess on Windows."""
    if not hasattr(os, "sysconf"):  # Windows
        return ASSUMED_MEMORY
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total


def available() -> list[str]:
    """Return the kinds of devices that are available, the best first, `cpu` always last."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else [accelerator.type, "cpu"]


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Use this many CPU threads inside the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def configure(threads: int | None, *, deterministic: bool = True) -> None:
    """Set CPU threads (default: all available) and deterministic algorithms for this process.

    Entry points call this once before they compute: the thread count changes the last bits of results.
    """
    import torch

    torch.set_num_threads(threads or available_threads())
    # Accumulate products of 16-bit numbers in fp32 on NVIDIA's devices.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    # What torch.use_deterministic_algorithms does, without importing the compiler, which takes over a second.
    torch._C._set_deterministic_algorithms(deterministic, warn_only=True)
    # Deterministic mode would also fill every new tensor before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def select(name: str, environment: Mapping[str, str] | None = None) -> torch.device:
    """Return the device of a name; `auto` is the best one available. Does not touch the device.

    Several processes of a host use one accelerator each, numbered by LOCAL_RANK, unless the name has a number.
    """
    import torch

    env = os.environ if environment is None else environment
    kinds = available()
    try:
        requested = torch.device(kinds[0] if name == "auto" else name)
    except RuntimeError:
        raise DeviceError(
            f"--device {name}: unknown device; choose auto or one of {', '.join(kinds)}, "
            "or install its extension of PyTorch"
        ) from None
    if requested.type not in kinds:
        raise DeviceError(f"--device {name}: not available on this machine; choose auto or one of {', '.join(kinds)}")
    if requested.type == "cpu":
        return torch.device("cpu")
    return _check_index(requested, env.get("LOCAL_RANK", env.get("SLURM_LOCALID")), name)


def _check_index(requested: torch.device, local_rank: str | None, name: str) -> torch.device:
    """Return the device with its number; no two processes use the same one."""
    import torch

    count = torch.accelerator.device_count()
    index = int(local_rank or 0) if requested.index is None else requested.index
    if index >= count:
        have = f"this host has {count} {requested.type} device{'s' * (count != 1)}"
        if requested.index is not None:
            raise DeviceError(f"--device {name}: {have}; choose a smaller number")
        raise DeviceError(
            f"--device {name}: local rank {index} has no device, {have}; start at most {count} processes on it, or use "
            "--device cpu"
        )
    return torch.device(requested.type, index)


def use(device: torch.device) -> None:
    """Make an accelerator the current one of this process. Call before computing or communicating with it."""
    import torch

    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)


def explain_failure(error: RuntimeError, device: torch.device) -> ConvolveError | None:
    """Return the error of a device that is out of memory or failed, or None if the device is not the cause."""
    import torch

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (torch.OutOfMemoryError, torch.AcceleratorError)):
        cause = cause.__cause__
    problem = to_one_line(str(cause)).partition(". ")[0]
    if isinstance(cause, torch.OutOfMemoryError):
        return DeviceMemoryError(
            f"--device {device}: out of memory ({problem}); use a smaller --batch-size with more "
            "--gradient-accumulation-count, --enable-recomputation, or more --shards"
        )
    if cause is not None:
        return DeviceFailedError(
            f"--device {device}: failed ({problem}); resume with `convolve restore` on a working device"
        )
    return None


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device. The host does not wait: the copy is made from pinned memory."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def has_16_bit_arithmetic(device: torch.device, format_name: str) -> bool | None:
    """Return whether a device declares 16-bit arithmetic in `fp16` or `bf16`; None if a CPU has to be measured.

    NVIDIA's have units for fp16 since capability 7.0 and for bf16 since 8.0. Other devices list the formats of their
    autocast.
    """
    import torch

    if device.type == "cpu":
        flags = cpu_flags()
        return None if not flags or flags & CPU_FLAGS_16_BITS[format_name] else False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= ((7, 0) if format_name == "fp16" else (8, 0))
    if not torch.amp.is_autocast_available(device.type):
        return False
    formats = getattr(torch.get_device_module(device), "get_amp_supported_dtype", None)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[format_name]
    return formats is None or dtype in formats()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    import torch

    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


@cache
def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the widest float format in which the device can sum."""
    import torch

    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64
