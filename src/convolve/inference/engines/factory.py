"""Open an inference engine by name, or the fastest with `auto`.

No engine is used before its logits match those of the model (`probe`). An engine that fails is an error; with `auto` it
is logged and skipped.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import metadata
from typing import Protocol

import numpy as np

from convolve.errors import ConfigError, ConvolveError, suggest, to_one_line
from convolve.inference.engines import probe
from convolve.inference.engines.base import (
    AUTO,
    COMPILED_FOR_SIZE,
    Engine,
    Logits,
    Pixels,
    check_name,
    describe,
    is_installed,
)
from convolve.inference.engines.choice import MEASURE_SECONDS, Choice, Setting, measure, read_choice, store_choice
from convolve.inference.engines.probe import Predictor, compare, sample_pixels
from convolve.inference.metadata import ModelMetadata

BATCH_SIZES = (1, 8, 64)
LONG_BATCH_SECONDS = 0.1  # a model that needs longer is as fast in smaller batches
PAYOFF_SECONDS = 10.0
PAYOFF_SAMPLE = 8
_PACKAGES = {"aoti": "torch"}
Log = Callable[[str], object]
# Opens and verifies an engine by its name and the batch size that it is compiled for, once.
OpenFn = Callable[[str, int | None], Engine]


class EngineSource(Protocol):
    """A model that engines are opened from.

    `names` are the engines that can run it, the reference first, and `quick_names` those that open within seconds.
    `structure` is a hash of everything but the weights that the speed depends on.
    """

    @property
    def label(self) -> str:
        """Name of the model in messages."""

    @property
    def metadata(self) -> ModelMetadata:
        """Class names and input format."""

    @property
    def threads(self) -> int:
        """Number of CPU threads of every engine."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the input."""

    @property
    def tolerance(self) -> float:
        """Largest difference of logits from those of the model."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def quick_names(self) -> tuple[str, ...]: ...

    @property
    def structure(self) -> str: ...

    def reference(self) -> Predictor:
        """Return the function that engines are compared with."""

    def open(self, name: str, batch_size: int | None) -> Engine:
        """Open one engine, prepared for a batch size; None: for any."""


class EngineSet:
    """The engine that is fastest at each of some batch sizes. Any other size uses the nearest, by ratio.

    If that is an engine that is compiled for its size, a batch is run in pieces of the sizes that there are.
    """

    def __init__(self, engines: Mapping[int, Engine]) -> None:
        self.engines = dict(engines)
        self.name = ", ".join(dict.fromkeys(engine.name for engine in engines.values()))
        self.version = ", ".join({engine.name: engine.version for engine in engines.values()}.values())

    def run(self, pixels: Pixels) -> Logits:
        nearest = self._nearest(max(1, len(pixels)))
        if len(pixels) == nearest or self.engines[nearest].name not in COMPILED_FOR_SIZE:
            return self.engines[nearest].run(pixels)
        logits = []
        for size in sorted(self.engines, reverse=True):
            while len(pixels) >= size:
                logits.append(self.engines[size].run(pixels[:size]))
                pixels = pixels[size:]
        if len(pixels) or not logits:
            logits.append(self.engines[nearest].run(pixels))
        return np.concatenate(logits)

    def _nearest(self, count: int) -> int:
        return min(self.engines, key=lambda size: max(size / count, count / size))


def open_engine(
    name: str,
    source: EngineSource,
    log: Log,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    expected_images: int | None = None,
    longest_seconds: float = float("inf"),
) -> Engine:
    """Open and verify an engine. `auto` chooses the fastest for each of the batch sizes.

    Args:
        expected_images: number of images to classify; for so few that a choice does not pay off, `auto` is the first
            engine of the source.
        longest_seconds: larger batches, which would take longer, are not measured, to start sooner.
    """
    check_name(name)
    if name == AUTO and expected_images is not None and _is_short(source, expected_images):
        name = source.names[0]
    open_verified = cache(partial(_open_verified, source))
    if name == AUTO:
        sizes, engines, rate = sorted(set(batch_sizes)), dict[int, Engine](), float("inf")
        for size in sizes:
            if engines and size / rate > longest_seconds:
                took = f"about {size / rate:.1f} s a batch"
                log(f"engine at batch size {size}: as at {max(engines)}, not measured ({took})")
                break
            engines[size], rate = _choose(source, open_verified, size, MEASURE_SECONDS / len(sizes), log)
        return EngineSet(engines) if len({id(engine) for engine in engines.values()}) > 1 else engines[min(engines)]
    if name not in source.names:
        raise ConfigError(f"--engine {name}: cannot run {source.label}; {suggest(name, (AUTO, *source.names))}")
    engine = open_verified(name, _compiled_size(name, batch_sizes[0]))
    log(f"engine {describe(engine)}, {_format_threads(source)}")
    return engine


def _is_short(source: EngineSource, images: int) -> bool:
    """Return True if the first engine of the source needs less time for these images than a choice takes."""
    engine, count = source.open(source.names[0], None), min(images, PAYOFF_SAMPLE)
    pixels = np.ascontiguousarray(sample_pixels(source.shape[1], source.shape[2], source.shape[0], count))
    engine.run(pixels)
    start = time.perf_counter()
    engine.run(pixels)
    return (time.perf_counter() - start) * images / count < PAYOFF_SECONDS


def _compiled_size(name: str, batch_size: int) -> int | None:
    """Return the batch size that an engine is compiled for; None if it runs all sizes alike."""
    return batch_size if name in COMPILED_FOR_SIZE else None


def _open_verified(source: EngineSource, name: str, batch_size: int | None) -> Engine:
    """Open an engine and reject one that fails or whose logits differ from those of the model."""
    if name == source.names[0]:
        return source.open(name, batch_size)
    channels, height, width = source.shape
    remedy = f"use --engine {source.names[0]}"
    try:
        engine = source.open(name, batch_size)
        sizes = tuple(dict.fromkeys((*probe.BATCH_SIZES, batch_size or 1)))
        result = compare(engine.run, source.reference(), sample_pixels(height, width, channels, sum(sizes)), sizes)
    except ConvolveError:
        raise
    except Exception as error:  # an engine is another program, which can fail in any way
        reason = to_one_line(f"{type(error).__name__}: {error}")[:200]
        raise ConvolveError(f"--engine {name}: cannot run {source.label} ({reason}); {remedy}") from error
    if not result.largest_difference <= source.tolerance:
        raise ConvolveError(
            f"--engine {name}: logits of {source.label} differ by {result.largest_difference:.2g} of the largest, more "
            f"than {source.tolerance:g}; {remedy}"
        )
    return engine


def _choose(
    source: EngineSource, open_verified: OpenFn, batch_size: int, seconds: float, log: Log
) -> tuple[Engine, float]:
    """Return the fastest engine for a batch size and its images/s, from the cache if it was measured before."""
    names = [name for name in source.quick_names if is_installed(name)]
    versions = {name: metadata.version(_PACKAGES.get(name, name)) for name in names}
    if len(names) == 1:
        engine = open_verified(names[0], _compiled_size(names[0], batch_size))
        log(f"engine {describe(engine)}, {_format_threads(source)}; no other is installed")
        return engine, float("inf")
    setting = Setting(source.structure, batch_size, source.threads, versions)
    stored = read_choice(setting)
    if stored is not None:
        engines = _open_all([stored.engine], open_verified, batch_size, log)
        if engines:
            log(_describe_choice(engines[stored.engine], batch_size, source, stored, ["measured earlier"]))
            return engines[stored.engine], stored.images_per_second[stored.engine]
    engines = _open_all(names, open_verified, batch_size, log)
    channels, height, width = source.shape
    pixels = np.ascontiguousarray(sample_pixels(height, width, channels, batch_size))
    choice = measure(engines, pixels, seconds=seconds)
    if len(engines) == len(names):  # an engine that failed may work later
        store_choice(setting, choice)
    log(_describe_choice(engines[choice.engine], batch_size, source, choice, []))
    return engines[choice.engine], choice.images_per_second[choice.engine]


def _open_all(names: Sequence[str], open_verified: OpenFn, batch_size: int, log: Log) -> dict[str, Engine]:
    engines: dict[str, Engine] = {}
    for name in names:
        try:
            engines[name] = open_verified(name, _compiled_size(name, batch_size))
        except ConvolveError as error:
            log(f"engine {name}: skipped ({error})")
    return engines


def _format_threads(source: EngineSource) -> str:
    return f"{source.threads} thread{'s' if source.threads > 1 else ''}"


def _describe_choice(
    engine: Engine, batch_size: int, source: EngineSource, choice: Choice, notes: Sequence[str]
) -> str:
    others = [f"{name} {rate:,.0f}" for name, rate in choice.images_per_second.items() if name != engine.name]
    rate, compared = choice.images_per_second[engine.name], ", ".join([*others, *notes])
    setting = f"batch size {batch_size}, {_format_threads(source)}"
    return f"engine {describe(engine)} at {setting}: {rate:,.0f} images/s{f' ({compared})' if compared else ''}"
