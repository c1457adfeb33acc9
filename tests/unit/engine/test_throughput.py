"""Throughput from a fake clock: which time counts, and over which intervals."""

import pytest

from convolve.engine.throughput import Timer


class FakeClock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return FakeClock()


def test_the_first_interval_is_not_counted(clock):
    timer = Timer(clock)
    clock.advance(100.0)
    timer.split(step=10, samples=640, waited_seconds=0.0)
    assert not timer.first_excluded
    clock.advance(2.0)
    interval = timer.split(step=20, samples=1280, waited_seconds=0.5)
    assert (interval.images_per_second, interval.ms_per_step, interval.data_wait_share) == (320.0, 200.0, 0.25)
    clock.advance(3.0)
    timer.split(step=30, samples=1880, waited_seconds=1.0)
    assert timer.first_excluded
    assert (timer.measured.images_per_second, timer.measured.ms_per_step) == (1240 / 5.0, 1000 * 5.0 / 20)
    assert timer.measured.data_wait_share == 0.2


def test_the_only_interval_is_counted(clock):
    timer = Timer(clock, step=5, samples=500)
    assert timer.measured is None
    clock.advance(2.0)
    interval = timer.split(step=9, samples=600, waited_seconds=1.0)
    assert not timer.first_excluded and timer.measured == interval
    assert (interval.steps, interval.samples, interval.data_wait_share) == (4, 100, 0.5)
    assert (interval.images_per_second, interval.ms_per_step) == (50.0, 500.0)


def test_time_in_which_the_timer_is_paused_does_not_count(clock):
    timer = Timer(clock, previous_seconds=50.0)
    clock.advance(1.0)
    with timer.paused():
        clock.advance(10.0)
        assert timer.seconds == 1.0
    clock.advance(2.0)
    assert (timer.seconds, timer.total_seconds) == (3.0, 53.0)


def test_an_interval_without_time_has_no_throughput(clock):
    interval = Timer(clock).split(step=0, samples=0, waited_seconds=0.0)
    assert (interval.images_per_second, interval.ms_per_step, interval.data_wait_share) == (0.0, 0.0, 0.0)
