"""Many JPEGs read by one native call, which also finds their sizes.

Each file that Python opens, reads and closes hands the interpreter over to other threads three times, and each of these
may have to wait to get it back. Here a thread does so once for many pictures. What native code does not take (anything
that is not a plain JPEG, or cannot be read), and everything where there is no compiler, is read one by one.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from convolve.kernels import build

Encoded: TypeAlias = bytes | memoryview
Places: TypeAlias = npt.NDArray[np.int64]


class Jpeg(NamedTuple):
    """The bytes of a JPEG that decodes as it should look, and its height and width."""

    data: Encoded
    size: tuple[int, int]


Read: TypeAlias = Callable[[Sequence[bytes], Places, npt.NDArray[np.uint8]], list[Jpeg | None]]


def read_jpegs(paths: Sequence[bytes], places: Places, memory: npt.NDArray[np.uint8]) -> list[Jpeg | None]:
    """The pictures at `places` [N, 3] (any number, offset, length or -1 for all) of N files, as parts of `memory`; None
    for those that have to be read in another way."""
    return (_load() or _read_none)(paths, places, memory)


def _read_none(paths: Sequence[bytes], places: Places, memory: npt.NDArray[np.uint8]) -> list[Jpeg | None]:
    return [None] * len(paths)


@cache
def _load() -> Read | None:
    library = build.load("convolve.kernels.csrc", "jpeg.c")
    return None if isinstance(library, str) else bind(library)


def bind(library: build.Library) -> Read:
    """The native form in a compiled library."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    call = library.function("convolve_read_jpegs", (ctypes.c_char_p, pointer, ctypes.c_int, pointer, number, pointer))

    def read_natively(paths: Sequence[bytes], places: Places, memory: npt.NDArray[np.uint8]) -> list[Jpeg | None]:
        places, found = np.ascontiguousarray(places), np.empty((len(paths), 4), np.int64)
        call(b"\0".join(paths), places.ctypes.data, len(paths), memory.ctypes.data, len(memory), found.ctypes.data)
        view = memory.data
        return [
            Jpeg(view[start : start + length], (height, width)) if length else None
            for start, length, height, width in found.tolist()
        ]

    return read_natively
