"""Engines are measured in turns, and the choice is kept in a private file of the cache."""

import json

import numpy as np
import pytest

from convolve.inference.engines.choice import Choice, Setting, measure, read_choice, store_choice

SETTING = Setting("model", 8, 2, {"torch": "2", "openvino": "3"})


class Clock:
    now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class TimedEngine:
    """Takes some time on a clock; every `slow` calls one takes ten times as long."""

    def __init__(self, clock, seconds, slow=10**9):
        self.clock, self.seconds, self.slow, self.calls = clock, seconds, slow, 0

    def run(self, pixels):
        self.calls += 1
        self.clock.now += self.seconds * (10 if self.calls % self.slow == 0 else 1)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("CONVOLVE_CACHE", str(tmp_path))
    return tmp_path / "engines"


def test_the_fastest_engine_wins_despite_outliers():
    clock = Clock()
    engines = {"torch": TimedEngine(clock, 0.004), "openvino": TimedEngine(clock, 0.003, slow=4)}
    found = measure(engines, np.zeros((6, 1)), seconds=1.0, clock=clock, sleep=clock.sleep)
    assert found.engine == "openvino"
    assert found.images_per_second == pytest.approx({"torch": 6 / 0.004, "openvino": 6 / 0.003})
    assert 1.0 <= clock.now < 1.4


def test_the_start_of_a_turn_is_not_counted():
    """Threads of the engine before it may still spin then."""
    clock = Clock()

    class Disturbed(TimedEngine):
        turn_start = 0.0

        def run(self, pixels):
            if clock.now - self.turn_start > 0.1:
                self.turn_start = clock.now
            self.clock.now += 0.009 if clock.now - self.turn_start < 0.02 else 0.001

    engines = {"torch": TimedEngine(clock, 0.002), "openvino": Disturbed(clock, 0.001)}
    found = measure(engines, np.zeros((6, 1)), seconds=1.0, clock=clock, sleep=clock.sleep)
    assert found.engine == "openvino" and found.images_per_second["openvino"] == pytest.approx(6000)


def test_a_slow_model_is_measured_once_in_each_engine():
    clock = Clock()
    engines = {"torch": TimedEngine(clock, 3.0), "openvino": TimedEngine(clock, 2.0)}
    assert measure(engines, np.zeros((64, 1)), seconds=1.0, clock=clock, sleep=clock.sleep).engine == "openvino"
    assert [engine.calls for engine in engines.values()] == [2, 2]


def test_a_choice_is_stored_and_read(cache):
    assert read_choice(SETTING) is None
    choice = Choice("openvino", {"torch": 10.0, "openvino": 20.0})
    store_choice(SETTING, choice)
    assert read_choice(SETTING) == choice
    (path,) = cache.iterdir()
    stored = json.loads(path.read_text())
    assert (stored["batch_size"], stored["threads"], stored["versions"]) == (8, 2, SETTING.versions)
    assert cache.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", ["", "[]", "{", '{"engine": "torch"}', '{"engine": "x", "images_per_second": {}}'])
def test_a_damaged_choice_is_measured_again(cache, content):
    store_choice(SETTING, Choice("torch", {"torch": 1.0}))
    (path,) = cache.iterdir()
    path.write_text(content)
    assert read_choice(SETTING) is None


def test_a_choice_holds_for_one_setting_only():
    others = [
        Setting("other", 8, 2, SETTING.versions),
        Setting("model", 1, 2, SETTING.versions),
        Setting("model", 8, 1, SETTING.versions),
        Setting("model", 8, 2, {"torch": "2", "openvino": "4"}),
        Setting("model", 8, 2, {"torch": "2"}),
    ]
    assert len({setting.key() for setting in (SETTING, *others)}) == 6
