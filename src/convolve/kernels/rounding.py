"""Round float32 tensors onto a 16-bit grid in native code (`rounding.c`).

It takes dense CPU tensors and uses the threads of torch's OpenMP library, since two pools on the same cores would wait
for each other. If `load` returns None, `numerics/rounding.py` uses its torch form, which computes the same bits.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from convolve.kernels import build

_FILE = "rounding.c"
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
class RoundingKernel:
    """The compiled function, and torch's threads."""

    call: Callable[..., int]
    parallel: int | None

    def round_(self, x: Tensor, kind: int, *, clamped: bool, key: int) -> int:
        """Round in place. Returns the flags documented in the C file."""
        return self.call(x.data_ptr(), x.numel(), kind, clamped, key, torch.get_num_threads(), self.parallel)


@cache
def load() -> RoundingKernel | None:
    """Load the kernel for this CPU; None if it is unavailable."""
    library = build.load(_FILE)
    if isinstance(library, build.Unavailable):
        return None
    return RoundingKernel(library.function("convolve_round", _SIGNATURE), build.torch_threads())


def describe() -> str:
    """Describe which form rounds, and why if it is not the native one."""
    library = build.load(_FILE)
    if isinstance(library, build.Unavailable):
        return f"rounding in torch ({library.reason})"
    return "rounding in native code"
