"""Measure training and inference on a few photos, to plan a run within a time budget."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from convolve import device
from convolve.config import Config
from convolve.distributed.collectives import SingleProcess
from convolve.engine.build import build, build_numerics, open_data, run_span
from convolve.engine.step import train_step
from convolve.loggers.base import SilentConsole
from convolve.runs.clock import elapsed_seconds
from convolve.runs.teacher import add_teacher
from convolve.transfer.features import PASS, FeatureExtractor

STEPS, LEAST_STEPS, MOST_SECONDS = 6, 2, 5.0
IMAGES = 32
INFERRED = 48


@dataclass(frozen=True)
class PhotoTime:
    """Seconds to train on one photo and to evaluate one, decoding included, and those since the process started."""

    train: float
    infer: float
    elapsed: float


def measure_photos(config: Config) -> PhotoTime:
    """Time a few steps and a few forward passes; the weights are random and thrown away.

    The fastest step counts: the first ones are slow, and the run has many more.
    """
    device.configure(config.run.threads)
    images = min(config.optim.batch_size, IMAGES)
    single = config.replace(batch_size=images, gradient_accumulation_count=1)
    data = open_data(single, SilentConsole())
    numerics = build_numerics(single, data.device, run_span(single, data), folder=Path())
    state, parts = build(config=single, data=data, collectives=SingleProcess(), numerics=numerics)
    parts = add_teacher(single, data, parts)
    extractor = FeatureExtractor(state.model, data, SilentConsole().progress)
    batches = data.train_loader().step_batches(single.run.seed, 0, images, images)
    state.model.train()
    photo_seconds, started = list[float](), time.perf_counter()
    for number in range(STEPS):
        if number >= LEAST_STEPS and time.perf_counter() - started > MOST_SECONDS:
            break
        before = state.samples
        with _timed(data.device) as step:
            train_step(state, next(batches), parts)
        photo_seconds.append(step[0] / (state.samples - before))
    rows = np.arange(min(INFERRED, len(data.dataset.train)))
    _consume(extractor.stream(data.dataset.train, rows[:PASS], "warm up"))
    with _timed(data.device) as inference:
        _consume(extractor.stream(data.dataset.train, rows, "measure"))
    return PhotoTime(min(photo_seconds), inference[0] / len(rows), elapsed_seconds())


def _consume(items: Iterable[object]) -> None:
    for _ in items:
        pass


@contextmanager
def _timed(target: torch.device) -> Iterator[list[float]]:
    """Time a block; the seconds are in the list after it."""
    seconds: list[float] = []
    device.synchronize(target)
    started = time.perf_counter()
    yield seconds
    device.synchronize(target)
    seconds.append(time.perf_counter() - started)
