"""Splits of a model into stages are optimal, compared with all possible splits."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convolve.distributed.partition import balance_stages
from convolve.errors import ConfigError


def most_expensive(costs, starts):
    ends = [*starts[1:], len(costs)]
    return max(sum(costs[start:end]) for start, end in zip(starts, ends, strict=True))


def all_splits(blocks, stages):
    return ([0, *rest] for rest in combinations(range(1, blocks), stages - 1))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(1, 9))
def test_no_other_split_has_a_cheaper_most_expensive_stage(costs, stages):
    stages = min(stages, len(costs))
    starts = balance_stages(costs, stages)
    assert starts[0] == 0 and starts == sorted(set(starts)) and len(starts) == stages
    assert most_expensive(costs, starts) == min(
        most_expensive(costs, split) for split in all_splits(len(costs), stages)
    )


@given(st.lists(st.integers(1, 9), min_size=2, max_size=7), st.integers(2, 4), st.integers(5, 20))
def test_with_limited_memory_the_best_split_that_fits_is_returned(costs, stages, memory):
    """Memory runs against cost here: block i needs 10 - cost, so cheap blocks are large."""
    stages = min(stages, len(costs))

    def fits(stage, start, end):
        return sum(10 - cost for cost in costs[start:end]) <= memory

    fitting = [
        split
        for split in all_splits(len(costs), stages)
        if all(fits(0, a, b) for a, b in zip(split, [*split[1:], len(costs)], strict=True))
    ]
    if not fitting:
        with pytest.raises(ConfigError, match="no split .* fits"):
            balance_stages(costs, stages, fits)
        return
    assert most_expensive(costs, balance_stages(costs, stages, fits)) == min(
        most_expensive(costs, split) for split in fitting
    )


def test_equal_blocks_are_divided_evenly():
    assert balance_stages([1.0] * 8, 4) == [0, 2, 4, 6]


def test_one_expensive_block_is_a_stage_by_itself():
    assert balance_stages([1, 1, 10, 1, 1], 3) == [0, 2, 3]


def test_as_many_stages_as_blocks_is_one_each():
    assert balance_stages([3, 0, 5], 3) == [0, 1, 2]


def test_three_hundred_blocks_are_split_into_sixteen_stages():
    costs = [(7 * index) % 13 + 1.0 for index in range(300)]
    assert len(balance_stages(costs, 16)) == 16


@pytest.mark.parametrize("stages", [0, 4])
def test_a_stage_without_a_block_is_rejected(stages):
    with pytest.raises(ConfigError, match=f"--shards {stages}: the model has 3 blocks"):
        balance_stages([1, 2, 3], stages)
