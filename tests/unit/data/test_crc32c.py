import random

import numpy as np
import pytest

from convolve.data.readers.crc32c import crc32c_ranges, mask
from data_samples import crc32c, slow_crc


def test_the_check_value_of_the_standard_is_met() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 7, 8, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000, 4097])
def test_every_length_agrees_with_the_definition(length: int) -> None:
    data = random.Random(length).randbytes(length)
    assert crc32c(data) == slow_crc(data)


def test_ranges_of_mixed_length_are_computed_independently() -> None:
    chance = random.Random(1)
    data = chance.randbytes(5000)
    starts = [chance.randrange(4000) for _ in range(60)]
    lengths = [chance.choice([0, 1, 3, 64, 200, 900]) for _ in range(60)]
    expected = [slow_crc(data[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
    assert crc32c_ranges(data, np.array(starts), np.array(lengths)).tolist() == expected


def test_ranges_beyond_one_batch_of_working_memory_agree_with_single_ones() -> None:
    data = random.Random(2).randbytes(1 << 20)
    starts = np.arange(0, 20, dtype=np.int64)
    lengths = np.full(20, (1 << 20) - 20, np.int64)
    together = crc32c_ranges(data, starts, lengths).tolist()
    assert together == [crc32c(data[start : start + (1 << 20) - 20]) for start in range(20)]


def test_no_range_gives_no_value() -> None:
    assert crc32c_ranges(b"", np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


def test_a_mask_rotates_and_adds() -> None:
    crc = 0xE3069283
    expected = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert mask(np.array([crc], np.uint32)).tolist() == [expected]
