"""Timing in alternating turns, without the first calls, on a clock that only the measured work moves."""

import numpy as np
import pytest

from convolve.bench.timer import MIN_TURNS, TURN_SECONDS, Times, peak_rss_bytes, time_alternating


class FakeClock:
    """Clock that advances when work is done."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def __call__(self):
        return self.now

    def work(self, name, *seconds):
        """Work that takes these seconds, and the last of them in all further calls."""
        rest = list(seconds)

        def run():
            self.calls.append(name)
            self.now += rest.pop(0) if len(rest) > 1 else rest[0]

        return run


@pytest.fixture
def clock():
    return FakeClock()


def test_figures_are_those_of_their_definitions():
    times = Times(np.arange(1.0, 1002.0), first_excluded=True)
    assert times.mean == pytest.approx(501)
    assert [times.quantile(fraction) for fraction in (0.5, 0.99, 0.999)] == pytest.approx([501, 991, 1000])


def test_variants_alternate_and_the_first_call_is_dropped(clock):
    works = {name: clock.work(name, 0.015) for name in "ab"}
    times = time_alternating(works, seconds=4 * TURN_SECONDS, clock=clock)
    turn_calls, turns = 4, 4  # 4 calls of 15 ms fill a turn of 50 ms; 4 turns of 60 ms fill 200 ms of each
    assert clock.calls == [*"ab", *(("a" * turn_calls + "b" * turn_calls) * turns)]
    for measured in times.values():
        assert measured.first_excluded
        assert measured.milliseconds == pytest.approx([15] * (turn_calls - 1) * turns)


def test_work_that_is_slower_than_a_turn_is_counted_completely(clock):
    times = time_alternating({"slow": clock.work("slow", 1.2 * TURN_SECONDS)}, seconds=0.01, clock=clock)
    assert len(clock.calls) == 1 + MIN_TURNS == 1 + len(times["slow"].milliseconds)


def test_a_first_call_with_one_time_costs_is_not_counted(clock):
    times = time_alternating({"cold": clock.work("cold", 300.0, 0.001)}, seconds=0.1, clock=clock)
    assert times["cold"].milliseconds == pytest.approx(1)


def test_the_peak_of_memory_is_seen():
    before = peak_rss_bytes()
    held = np.ones(200_000_000 // 8)
    assert peak_rss_bytes() >= before and held.nbytes < peak_rss_bytes()
