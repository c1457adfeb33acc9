"""Checksums of many blocks of memory in one call (`checksum.c`).

A block is an array of 32-bit words, and its checksum their sum modulo 2^32. numpy computes the same sums if no compiler
is installed. One call is for small models: after a step, the caches contain neither numpy's code nor its objects, and a
call per tensor takes longer than the sums.
"""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from convolve.kernels import build

Words = npt.NDArray[np.uint32]


def bind(blocks: Sequence[Words]) -> Callable[[], Words]:
    """Return a function that computes the checksums of these blocks, whose memory it keeps alive."""
    library = build.load("checksum.c")
    if isinstance(library, build.Unavailable):
        return lambda: np.array([np.add.reduce(block, 0, np.uint32) for block in blocks], np.uint32)
    pointer = ctypes.c_void_p
    call = library.function("convolve_checksum", (pointer, pointer, ctypes.c_int64, pointer), None)
    addresses = np.array([block.ctypes.data for block in blocks], np.uintp)
    lengths, sums = np.array([len(block) for block in blocks], np.int64), np.zeros(len(blocks), np.uint32)
    given = (addresses.ctypes.data, lengths.ctypes.data, len(blocks), sums.ctypes.data)

    def sum_blocks(_alive: object = (blocks, addresses, lengths)) -> Words:
        call(*given)
        return sums.copy()

    return sum_blocks
