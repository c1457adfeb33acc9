"""C kernels of layers as Python functions, and tensors as pointers."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convolve.kernels import build
from convolve.kernels.build import Unavailable

POINTER, INT, LONG, DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
# Allow FMA contraction: these kernels need not match PyTorch bit for bit.
OPTIONS = ("-ffp-contract=fast",)


class Signatures(NamedTuple):
    """Argument types of the functions of a C file, without the two that end both passes: threads and GOMP_parallel."""

    forward: Sequence[Any]
    backward: Sequence[Any]
    scratch: Sequence[Any]


class Kernel(NamedTuple):
    """Functions of a compiled C file: both passes, the bytes of scratch memory that they need, and GOMP_parallel."""

    forward: Callable[..., int]
    backward: Callable[..., int]
    scratch: Callable[..., int]
    parallel: int | None
    library: build.Library

    def constant(self, name: str) -> int:
        """Return a compiled-in number."""
        return self.library.function(f"convolve_{name}", ())()


def load_kernel(file: str, signatures: Signatures, options: tuple[str, ...] = ()) -> Kernel | Unavailable:
    """Load the kernel of a C file, whose functions start with `convolve_` and the file's name."""
    library = build.load(file, (*OPTIONS, *options))
    if isinstance(library, Unavailable):
        return library
    name = f"convolve_{file.removesuffix('.c')}"
    return Kernel(
        library.function(f"{name}_forward", (*signatures.forward, INT, POINTER)),
        library.function(f"{name}_backward", (*signatures.backward, INT, POINTER)),
        library.function(f"{name}_scratch", signatures.scratch, LONG),
        build.torch_threads(),
        library,
    )


def require(kernel: Kernel | Unavailable) -> Kernel:
    """Return the kernel of a layer that was replaced because the kernel is available."""
    assert isinstance(kernel, Kernel), f"native layer without a kernel: {kernel.reason}"
    return kernel


def are_plain(x: Tensor, weight: Tensor) -> bool:
    """Check that C can read both: a plain batch of images, float32, in CPU memory."""
    return (
        type(x) is Tensor
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and x.ndim == 4
    )


def is_vector(values: Tensor | None, length: int) -> bool:
    """Check that C can read one number per channel: float32, contiguous, in CPU memory."""
    return (
        values is not None
        and values.dtype == torch.float32
        and values.device.type == "cpu"
        and values.shape == (length,)
        and values.is_contiguous()
    )


def dense(x: Tensor) -> Tensor:
    """Return the values in contiguous channels-last memory, which all kernels expect."""
    return x.contiguous(memory_format=torch.channels_last)


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Return the data pointers; None becomes NULL in C."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]
