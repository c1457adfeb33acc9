"""`convolve bench data`: the input alone, without a network, and whether it could keep one busy."""

import time
from dataclasses import dataclass

import torch

from convolve import device, rng
from convolve.config import Config
from convolve.data.build import DataModule
from convolve.engine.build import build_model, open_data
from convolve.engine.loss import CrossEntropy
from convolve.loggers.base import Console

MODEL_STEPS = 3


@dataclass(frozen=True)
class DataSpeed:
    """How fast batches come. The first reading is dropped: it holds one-time costs."""

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
    """Measure the host pipeline on `images` training samples, and a few steps of the network beside it."""
    device.configure(config.run.threads)
    material = open_data(config, console)
    delivered = _measure_loader(material, config, images, console)
    consumed = _measure_model(material, config)
    cores = device.available_threads()
    rate = delivered[0] / delivered[1]
    return DataSpeed(
        dataset=material.dataset.name,
        origin=material.dataset.origin,
        image_size=material.transform.height,
        batch_size=config.optim.batch_size,
        workers=cores if config.data.workers is None else config.data.workers,
        images=delivered[0],
        seconds=delivered[1],
        images_per_second=rate,
        images_per_second_per_core=rate / cores,
        model=config.model.model,
        model_images_per_second=consumed,
        starved=rate < consumed,
    )


def _measure_loader(material: DataModule, config: Config, images: int, console: Console) -> tuple[int, float]:
    loader = material.train_loader()
    size = config.optim.batch_size
    batches = loader.step_batches(config.run.seed, 0, size, size)
    next(batches)
    done, began = 0, time.perf_counter()
    while done < images:
        done += next(batches).global_samples
        console.progress("bench data", min(done, images), images)
    return done, time.perf_counter() - began


def _measure_model(material: DataModule, config: Config) -> float:
    """Images per second of forward and backward passes on one batch that is already there."""
    network = build_model(config, material.transform, len(material.dataset.classes), material.device).train()
    size = min(config.optim.batch_size, 32)
    batch = next(material.train_loader().batches(size))
    loss, best = CrossEntropy(), float("inf")
    for step in range(MODEL_STEPS):
        began = time.perf_counter()
        with rng.at(config.run.seed, step, first=0):
            torch.autograd.backward(loss(network(batch.images), batch.targets) / len(batch.labels))
        device.synchronize(material.device)
        best = min(best, time.perf_counter() - began)
    return len(batch.labels) / best
