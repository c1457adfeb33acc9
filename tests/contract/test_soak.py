"""The soak finds what grows, and only that."""

import importlib
import os

import numpy as np
import pytest

from documents import ROOT


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("soak")


def readings(soak, megabytes, files=None):
    count = len(megabytes)
    return soak.Readings([5.0 * turn for turn in range(count)], list(megabytes), files or [9] * count, [4] * count)


def wobble(count):
    return np.random.default_rng(0).normal(300, 4, count)


def test_memory_that_only_wobbles_is_flat(soak):
    found = readings(soak, wobble(700))
    assert abs(found.growth) < 0.01 and soak.judge("one", found, 0.02) == []


def test_a_slow_leak_is_found_under_the_wobble(soak):
    found = readings(soak, wobble(700) + np.linspace(0, 15, 700))
    assert found.slope == pytest.approx(15 / (699 * 5) * 3600, rel=0.2)
    assert soak.judge("one", found, 0.02) == [f"one: memory grew by {found.growth:.1%}, more than 2.0%"]


def test_memory_that_fills_up_at_the_start_is_not_counted(soak):
    start = np.concatenate([np.linspace(100, 300, 100), np.full(600, 300.0)])
    assert soak.judge("one", readings(soak, start).after_warm_up(), 0.02) == []


def test_a_file_that_stays_open_now_and_then_is_found(soak):
    found = readings(soak, [300.0] * 100, files=[9 + turn // 30 for turn in range(100)])
    assert soak.judge("one", found, 0.02) == ["one: open files rose from 9 to 11"]


def test_a_file_that_is_open_for_a_moment_is_no_leak(soak):
    found = readings(soak, [300.0] * 100, files=[9 + (turn % 7 == 6 and turn > 50) for turn in range(100)])
    assert soak.judge("one", found, 0.02) == []


def test_too_short_a_soak_proves_nothing(soak):
    assert soak.judge("one", readings(soak, [300.0] * 5), 0.02) == ["one: only 5 readings; give more --minutes"]


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_this_process_can_be_read(soak):
    found = soak.Readings()
    found.add(os.getpid(), 0.0)
    assert found.megabytes[0] > 10 and found.files[0] >= 3 and found.threads[0] >= 1
