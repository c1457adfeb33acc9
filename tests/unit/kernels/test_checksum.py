"""Checksums of memory: those of native code and of numpy are Python's sums."""

import gc

import numpy as np
import pytest

from convolve.kernels import build, checksum

LENGTHS = [0, 1, 2, 7, 8, 15, 16, 17, 33, 1000, 4097, 0, 100_003]


@pytest.fixture(params=["native", "numpy"])
def bind(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(build, "load", lambda file: build.Unavailable("no C compiler"))
    return checksum.bind


def expected(blocks):
    return [sum(block.tolist()) % 2**32 for block in blocks]


def test_checksums_are_sums_modulo_2_to_the_32(bind):
    draw = np.random.default_rng(1)
    blocks = [draw.integers(0, 2**32, length, np.uint32) for length in LENGTHS]
    sums = bind(blocks)()
    assert sums.dtype == np.uint32 and sums.tolist() == expected(blocks)


def test_a_later_call_sees_changed_words_and_leaves_earlier_results(bind):
    blocks = [np.ones(5, np.uint32), np.full(3, 2**32 - 1, np.uint32)]
    sums = bind(blocks)
    before = sums()
    blocks[1][2] = 7
    assert sums().tolist() == [5, 5] and before.tolist() == [5, 2**32 - 3]


def test_no_blocks_have_no_checksums(bind):
    assert bind([])().tolist() == []


def test_the_memory_of_the_blocks_stays_alive(bind):
    sums = bind([np.full(1 << 20, 3, np.uint32)])
    gc.collect()
    other = np.full(1 << 20, 5, np.uint32)
    assert sums().tolist() == [3 << 20] and other[0] == 5
