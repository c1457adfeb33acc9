"""Measure engines in alternating turns, and remember the fastest for this machine.

A choice depends on the CPU, the versions of the engines, the layers of the model, the batch size and the number of
threads, so these are its key in the cache. Weights do not change the speed: a later checkpoint uses the same choice.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from convolve import device
from convolve.directory import private_folder, read_regular
from convolve.errors import ConvolveError
from convolve.files import write_file
from convolve.inference.engines.base import Engine, Pixels

MEASURE_SECONDS = 1.0
TURN_SECONDS = 0.1
WARM_SECONDS = 0.03
PAUSE_SECONDS = 0.02
CACHE_KIND = "engines"
Clock = Callable[[], float]


@dataclass(frozen=True)
class Setting:
    """What the speed of an engine depends on. `versions` are those of the engines that compete, by name."""

    model: str
    batch_size: int
    threads: int
    versions: Mapping[str, str]

    def key(self) -> str:
        """Return a name for this setting on this CPU."""
        parts = [device.cpu_name(), sorted(device.cpu_flags()), asdict(self)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=dict).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Choice:
    """The fastest engine of a setting, and the images per second of each."""

    engine: str
    images_per_second: Mapping[str, float]


def measure(
    engines: Mapping[str, Engine],
    pixels: Pixels,
    *,
    seconds: float,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Choice:
    """Run the engines in alternating turns for about `seconds` in total, at least twice each, and compare medians.

    Idle threads of an engine spin for some milliseconds before they sleep, which slows down the next engine. Each turn
    therefore starts after a pause, and its first part is not counted.
    """
    for engine in engines.values():
        engine.run(pixels)
    times: dict[str, list[float]] = {name: [] for name in engines}
    end = clock() + seconds
    while True:
        for name, engine in engines.items():
            sleep(PAUSE_SECONDS)
            times[name] += _time_turn(engine, pixels, clock)
        if clock() >= end:
            break
    rates = {name: len(pixels) / max(median(calls), 1e-9) for name, calls in times.items()}
    return Choice(max(rates, key=lambda name: rates[name]), rates)


def _time_turn(engine: Engine, pixels: Pixels, clock: Clock) -> list[float]:
    """Return the seconds of each call in one turn, without those at its start if there are others."""
    calls: list[float] = []
    warm = 0
    begin = clock()
    while not calls or clock() < begin + TURN_SECONDS:
        start = clock()
        engine.run(pixels)
        calls.append(clock() - start)
        warm += start < begin + WARM_SECONDS
    return calls[warm:] or calls[-1:]


def read_choice(setting: Setting) -> Choice | None:
    """Return the stored choice; None if there is none, or one that this version cannot read."""
    with suppress(OSError, ConvolveError, ValueError, KeyError, TypeError, AttributeError):
        path = _choice_file(setting)
        stored = json.loads(read_regular(path))
        rates = {str(name): float(rate) for name, rate in stored["images_per_second"].items()}
        if stored["engine"] in rates and set(rates) <= set(setting.versions):
            with suppress(OSError):
                os.utime(path)  # the last use, which `convolve cache` lists
            return Choice(stored["engine"], rates)
    return None


def store_choice(setting: Setting, choice: Choice) -> None:
    """Store a choice. The cache may be read-only: the engines are then measured again."""
    with suppress(ConvolveError):
        text = json.dumps({**asdict(choice), **asdict(setting), "cpu": device.cpu_name()}, indent=1)
        write_file(_choice_file(setting), f"{text}\n".encode())


def _choice_file(setting: Setting) -> Path:
    return private_folder(device.cache_folder(), CACHE_KIND) / f"choice-{setting.key()}.json"
