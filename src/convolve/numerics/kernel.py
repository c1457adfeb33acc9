"""The native rounding kernel: a small C file, compiled on first use with the system's compiler and kept in the cache.

It speaks plain C through data pointers: no torch header, no extension module. Threads are those of torch's own OpenMP
library, since two pools on the same cores wait for each other. Where there is no compiler, or it fails, `load` gives
None, and `rounding` uses its torch form, which has the same bits.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from convolve import device

COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-O3", "-march=native", "-std=c11", "-ffp-contract=off", "-fno-trapping-math", "-shared", "-fPIC")
TIME_LIMIT = 120

_SIGNATURE = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_uint64,
    ctypes.c_int,
    ctypes.c_void_p,
)


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, ready to be called with dense float32 CPU tensors."""

    path: Path
    call: Callable[..., int]
    parallel: int | None

    def round_(self, x: Tensor, kind: int, *, clamped: bool, key: int) -> int:
        """Round in place; returns the flags that the C file explains."""
        return self.call(x.data_ptr(), x.numel(), kind, clamped, key, torch.get_num_threads(), self.parallel)


@cache
def load() -> Kernel | None:
    """The kernel for this CPU, compiled now if the cache has none; None where it cannot be compiled."""
    if sys.platform == "win32" or os.environ.get("CONVOLVE_KERNEL") == "torch":
        return None
    source = resources.files("convolve.numerics").joinpath("kernel.c").read_bytes()
    facts = " ".join([device.cpu_name(), platform.machine(), *sorted(device.cpu_flags()), *OPTIONS])
    name = hashlib.sha256(source + facts.encode()).hexdigest()[:16]
    path = device.cache_folder() / f"rounding-{name}.so"
    if not path.exists() and not _compile(source, path):
        return None
    try:
        call = ctypes.CDLL(str(path)).convolve_round
    except (OSError, AttributeError):
        # A library of another machine in a shared cache, or a damaged one: the torch form does the work.
        return None
    call.argtypes, call.restype = _SIGNATURE, ctypes.c_int
    return Kernel(path, call, _torch_threads())


def _compile(source: bytes, path: Path) -> bool:
    """Compile into a file of our own first: other processes see the whole library or none."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        return False
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [compiler, *OPTIONS, "-x", "c", "-", "-o", str(draft)],
            input=source,
            capture_output=True,
            timeout=TIME_LIMIT,
            check=False,
        )
        if done.returncode == 0:
            draft.replace(path)
        return done.returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
    finally:
        draft.unlink(missing_ok=True)


def _torch_threads() -> int | None:
    """The address of GOMP_parallel in the OpenMP library that torch has loaded; None: one thread."""
    folder = Path(torch.__file__).parent
    candidates = [*folder.glob("lib/lib*omp*"), *folder.parent.glob("torch.libs/lib*omp*")]
    for path in candidates:
        try:
            # Without RTLD_NOLOAD this could bring in a second pool; with it, only what torch uses is found.
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
