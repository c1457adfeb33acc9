"""Times that are compared are measured in turns, without the first, and summed up by their definitions."""

import time

import numpy as np
import pytest

from convolve.bench.timer import MIN_TURNS, TURN_SECONDS, Times, peak_rss_bytes, time_alternating


def test_figures_are_those_of_their_definitions():
    times = Times(np.arange(1.0, 1002.0), first_excluded=True)
    assert times.mean == pytest.approx(501)
    assert [times.quantile(share) for share in (0.5, 0.99, 0.999)] == pytest.approx([501, 991, 1000])


def test_variants_take_turns_and_the_first_call_is_dropped():
    order = []
    works = {name: (lambda name=name: (order.append(name), time.sleep(0.01))) for name in "ab"}
    found = time_alternating(works, seconds=4 * TURN_SECONDS)
    changes = sum(one != other for one, other in zip(order, order[1:], strict=False))
    assert order[:2] == ["a", "b"] and changes >= 2 * MIN_TURNS
    turns = (changes - 1) // 2 + 1
    for name, times in found.items():
        assert times.first_excluded
        assert len(times.milliseconds) <= order.count(name) - turns, "one call of each turn is not counted"
        assert times.quantile(0.5) == pytest.approx(10, rel=0.5)


def test_work_that_is_slower_than_a_turn_is_counted_whole():
    calls = []
    found = time_alternating({"slow": lambda: (calls.append(0), time.sleep(1.2 * TURN_SECONDS))}, seconds=0.01)
    assert len(calls) == 1 + MIN_TURNS == 1 + len(found["slow"].milliseconds)


def test_a_first_call_with_one_time_costs_does_not_count():
    waits = iter([0.3])
    found = time_alternating({"cold": lambda: time.sleep(next(waits, 0.001))}, seconds=0.1)
    assert found["cold"].milliseconds.max() < 200


def test_the_peak_of_memory_is_seen():
    before = peak_rss_bytes()
    held = np.ones(200_000_000 // 8)
    assert peak_rss_bytes() >= before and held.nbytes < peak_rss_bytes()
