"""Devices, CPU capabilities, threads and memory of this machine. The only file that names kinds of accelerators.

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
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from convolve.errors import DeviceError
from convolve.files import atomic_file
from convolve.interpreter import code_arguments

if TYPE_CHECKING:
    import torch


KINDS = ("cuda", "mps", "xpu", "npu")
ISA_LIMIT = "ONEDNN_MAX_CPU_ISA"
SAFE_ISA = "AVX512_CORE_FP16"
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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def memory_bytes() -> int:
    """Return the memory of the machine, or of the control group if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total


def available() -> list[str]:
    """Return the kinds of devices that are available, the best first, `cpu` always last."""
    import torch

    found = [kind for kind in KINDS if getattr(getattr(torch, kind, None), "is_available", lambda: False)()]
    return [*found, "cpu"]


def configure(threads: int | None, *, deterministic: bool = True) -> None:
    """Set CPU threads (default: all available) and deterministic algorithms for this process.

    Entry points call this once before they compute: the thread count changes the last bits of results.
    """
    import torch

    torch.set_num_threads(threads or available_threads())
    # What torch.use_deterministic_algorithms does, without importing the compiler, which takes over a second.
    torch._C._set_deterministic_algorithms(deterministic, warn_only=True)
    # Deterministic mode would also fill every new tensor before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def select(name: str) -> torch.device:
    """Return the device of a name; `auto` is the best one available."""
    import torch

    kinds = available()
    kind, _, index = name.partition(":")
    if name == "auto":
        return torch.device(kinds[0])
    if kind not in (*KINDS, "cpu") or (index and not index.isdigit()):
        raise DeviceError(f"--device {name}: unknown device; choose auto or one of {', '.join(kinds)}")
    if kind not in kinds:
        raise DeviceError(f"--device {name}: not available on this machine; choose auto or one of {', '.join(kinds)}")
    return torch.device(name)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return the widest float format in which the device can sum."""
    import torch

    return torch.float32 if device.type == "mps" else torch.float64
