"""The native rounding kernel, `kernel.c`: it rounds dense float32 CPU tensors through their data pointers.

Threads are those of torch's own OpenMP library, since two pools on the same cores wait for each other. Where there is
no native code, `load` gives None, and `rounding` uses its torch form, which has the same bits.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from convolve.kernels import build

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
    """A compiled kernel, ready to be called."""

    call: Callable[..., int]
    parallel: int | None

    def round_(self, x: Tensor, kind: int, *, clamped: bool, key: int) -> int:
        """Round in place; returns the flags that the C file explains."""
        return self.call(x.data_ptr(), x.numel(), kind, clamped, key, torch.get_num_threads(), self.parallel)


@cache
def load() -> RoundingKernel | None:
    """The kernel for this CPU; None where it cannot be compiled."""
    library = _library()
    if isinstance(library, str):
        return None
    return RoundingKernel(library.function("convolve_round", _SIGNATURE), build.torch_threads())


def describe() -> str:
    """In which form values are rounded, and why if that is not the native one."""
    library = _library()
    return f"rounding in torch ({library})" if isinstance(library, str) else "rounding in native code"


def _library() -> build.Library | str:
    return build.load("convolve.kernels.csrc", "rounding.c")
