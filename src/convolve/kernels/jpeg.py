"""Read many JPEG files and their image sizes in one native call.

Opening, reading and closing a file in Python releases the GIL three times, and the thread may have to wait each time to
get it back. Here a thread releases it once for many images. The caller reads one by one what native code does not
accept (anything but a plain, readable JPEG), and everything if no compiler is installed.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from convolve.kernels import build

Encoded: TypeAlias = bytes | memoryview
Extents: TypeAlias = npt.NDArray[np.int64]


class Jpeg(NamedTuple):
    """The bytes of a JPEG without EXIF rotation, and its height and width."""

    data: Encoded
    size: tuple[int, int]


Read: TypeAlias = Callable[[Sequence[bytes], Extents, npt.NDArray[np.uint8]], list[Jpeg | None]]


def read_jpegs(paths: Sequence[bytes], extents: Extents, memory: npt.NDArray[np.uint8]) -> list[Jpeg | None]:
    """Read N files into `memory`. Returns None for those that must be read in another way.

    `extents` is [N, 3]: any number, offset, length or -1 for the whole file.
    """
    read = load()
    return read(paths, extents, memory) if read else [None] * len(paths)


@cache
def load() -> Read | None:
    """Load the native form for this CPU; None if it cannot be compiled."""
    library = build.load("jpeg.c")
    return None if isinstance(library, build.Unavailable) else bind(library)


def bind(library: build.Library) -> Read:
    """Return the native form of `read_jpegs` in a compiled library."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    call = library.function("convolve_read_jpegs", (ctypes.c_char_p, pointer, ctypes.c_int, pointer, number, pointer))

    def read_natively(paths: Sequence[bytes], extents: Extents, memory: npt.NDArray[np.uint8]) -> list[Jpeg | None]:
        extents, results = np.ascontiguousarray(extents), np.empty((len(paths), 4), np.int64)
        call(b"\0".join(paths), extents.ctypes.data, len(paths), memory.ctypes.data, len(memory), results.ctypes.data)
        view = memory.data
        return [
            Jpeg(view[start : start + length], (height, width)) if length else None
            for start, length, height, width in results.tolist()
        ]

    return read_natively
