"""`convolve bench data`: speed of the input pipeline alone, compared with that of the model."""

import time
from dataclasses import dataclass

import torch

from convolve import device, rng
from convolve.config import Config
from convolve.data.build import DataModule
from convolve.engine.build import build_model, open_data
from convolve.engine.metrics import CrossEntropy
from convolve.loggers.base import Console

MODEL_STEPS = 3


@dataclass(frozen=True)
class DataSpeed:
    """Speed of the input pipeline. The first batch is not counted: it includes one-time costs."""

    dataset: str
    origin: str
    image_size: int
    batch_size: int
    workers: int
    images: int
    seconds: float
    images_per_second: float
    images_per_second_per_core: float
    model: str
    model_images_per_second: float
    starved: bool


def bench_data(config: Config, console: Console, *, images: int = 2000) -> DataSpeed:
    """Measure the input pipeline on `images` training samples, and the model on a few steps."""
    device.configure(config.run.threads)
    data = open_data(config, console)
    count, seconds = _measure_loader(data, config, images, console)
    model_rate = _measure_model(data, config)
    cores, rate = device.available_threads(), count / seconds
    return DataSpeed(
        dataset=data.dataset.name,
        origin=data.dataset.origin,
        image_size=data.transform.height,
        batch_size=config.optim.batch_size,
        workers=cores if config.data.workers is None else config.data.workers,
        images=count,
        seconds=seconds,
        images_per_second=rate,
        images_per_second_per_core=rate / cores,
        model=config.model.model,
        model_images_per_second=model_rate,
        starved=rate < model_rate,
    )


def _measure_loader(data: DataModule, config: Config, images: int, console: Console) -> tuple[int, float]:
    loader = data.train_loader()
    size = config.optim.batch_size
    batches = loader.step_batches(config.run.seed, 0, size, size)
    next(batches)
    done, start = 0, time.perf_counter()
    while done < images:
        done += next(batches).global_samples
        console.progress("bench data", min(done, images), images)
    return done, time.perf_counter() - start


def _measure_model(data: DataModule, config: Config) -> float:
    """Return images per second of forward and backward passes on one batch in memory."""
    model = build_model(config, data.transform, len(data.dataset.classes), data.device).train()
    size = min(config.optim.batch_size, 32)
    batch = next(data.train_loader().batches(size))
    loss, best = CrossEntropy(), float("inf")
    for step in range(MODEL_STEPS):
        start = time.perf_counter()
        with rng.at(config.run.seed, step, first=0):
            torch.autograd.backward(loss(model(batch.images), batch.targets) / len(batch.labels))
        device.synchronize(data.device)
        best = min(best, time.perf_counter() - start)
    return len(batch.labels) / best
