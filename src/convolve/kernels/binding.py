"""What the layers in native code share: C files of this package, compiled, and tensors as C sees them."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convolve.kernels import build

POINTER, INT, LONG, DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
PACKAGE = "convolve.kernels.csrc"
# Sums may be fused: the last bits of these layers are their own.
OPTIONS = ("-ffp-contract=fast",)
# Why C files that were asked for could not be compiled.
_reasons: dict[str, str] = {}


class Signatures(NamedTuple):
    """What the functions of a C file take; both passes end with the number of threads and what starts them."""

    forward: Sequence[Any]
    backward: Sequence[Any]
    scratch: Sequence[Any]


class Kernel(NamedTuple):
    """A compiled C file, ready to be called: its passes, how many bytes of scratch they need, and torch's threads."""

    forward: Callable[..., int]
    backward: Callable[..., int]
    scratch: Callable[..., int]
    parallel: int | None
    library: build.Library

    def constant(self, name: str) -> int:
        """A number that the compiled code has in it."""
        return self.library.function(f"convolve_{name}", ())()


def load_kernel(file: str, signatures: Signatures, options: tuple[str, ...] = ()) -> Kernel | None:
    """The kernel of a C file, whose functions start with `convolve_` and its name; None where it cannot be compiled."""
    library = build.load(PACKAGE, file, (*OPTIONS, *options))
    if isinstance(library, str):
        _reasons[file] = library
        return None
    name = f"convolve_{file.removesuffix('.c')}"
    return Kernel(
        library.function(f"{name}_forward", (*signatures.forward, INT, POINTER)),
        library.function(f"{name}_backward", (*signatures.backward, INT, POINTER)),
        library.function(f"{name}_scratch", signatures.scratch, LONG),
        build.torch_threads(),
        library,
    )


def explain_absence() -> str | None:
    """Why native code that this process asked for could not be had; None where all of it could."""
    reasons = dict.fromkeys(_reasons.values())
    return "; ".join(reasons) or None


def require(kernel: Kernel | None) -> Kernel:
    """The kernel of a layer that is asked for only where there is one."""
    assert kernel is not None, "asked for only where there is native code"
    return kernel


def are_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether native code can read both where they lie: a plain batch of images, float32 and CPU memory."""
    return (
        type(x) is Tensor
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.ndim == 4
    )


def dense(x: Tensor) -> Tensor:
    """The same values in channels-last memory without gaps, as all kernels read them."""
    return x.contiguous(memory_format=torch.channels_last)


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Where tensors lie; None, which C sees as NULL, for those that nobody needs."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]
