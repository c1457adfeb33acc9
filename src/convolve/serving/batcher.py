"""Dynamic batching: requests that arrive during a forward pass form the next batch.

A first image waits at most `max_delay` seconds for others, by default not at all. A batch has at most `max_batch`
images, and at most `queue` images wait. Further requests are rejected immediately instead of waiting in a growing
queue, so no image waits longer than about `queue / throughput`.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from convolve.data.image_io import Images
from convolve.device import available_cores
from convolve.errors import ConvolveError
from convolve.inference.classifier import Classifier, Probabilities
from convolve.inference.overlay import Heatmaps
from convolve.serving.metrics import Metrics
from convolve.serving.pending import PendingResults
from convolve.serving.requests import OverloadedError

EXPLAINED_TOGETHER = 4
# On one core, handing a small batch to a thread and back takes longer than to classify it.
SHORT_SECONDS = 0.005


@dataclass(frozen=True)
class BatchPolicy:
    """Limits of dynamic batching: delay in seconds, images in a batch, images in the queue."""

    max_delay: float = 0.0
    max_batch: int = 64
    queue: int = 256


@dataclass(frozen=True)
class _QueuedImage:
    pixels: Images
    arrival: float
    results: PendingResults[tuple[Classifier, Probabilities]]
    index: int


class Batcher:
    """Batches the requests of one model. `classifier` may be replaced at any time; running batches keep the old one."""

    def __init__(self, name: str, classifier: Classifier, policy: BatchPolicy, metrics: Metrics) -> None:
        self.name = name
        self.classifier = classifier
        self.policy = policy
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_QueuedImage] = deque()
        self._arrival = asyncio.Event()
        self._expired = False
        self._running = 0
        self._admitted = 0
        self._one_core = available_cores() == 1
        self._image_seconds = float("inf")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"model-{name}")

    @property
    def pending(self) -> int:
        """Number of images that are queued or being classified."""
        return len(self._queue) + self._running

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request from its header to its response. Raise OverloadedError before its body is read."""
        if self._admitted >= self.policy.queue:
            raise OverloadedError(f"{self._admitted} requests are in progress; try again later")
        self._admitted += 1
        try:
            yield
        finally:
            self._admitted -= 1

    async def classify(self, images: list[Images]) -> tuple[Classifier, list[Probabilities]]:
        """Return the probabilities of each image, and the classifier that computed the last of them."""
        if self.pending + len(images) > self.policy.queue:
            raise OverloadedError(f"{self.pending} images are queued; try again later")
        now = self._loop.time()
        pending: PendingResults[tuple[Classifier, Probabilities]] = PendingResults(self._loop, len(images))
        self._queue.extend(_QueuedImage(pixels, now, pending, index) for index, pixels in enumerate(images))
        self._arrival.set()
        results = await pending.future
        return results[-1][0], [row for _, row in results]

    async def explain(self, classifier: Classifier, pixels: Images, probabilities: Probabilities) -> Heatmaps:
        """Return heatmaps of the predicted classes, computed in turn with the batches.

        A few images at a time: others need not wait for all of them, and a request that is canceled stops soon.
        """
        classes = probabilities.argmax(axis=1).astype(np.int64)
        heatmaps = []
        for start in range(0, len(pixels), EXPLAINED_TOGETHER):
            rows = slice(start, start + EXPLAINED_TOGETHER)
            explaining = self._loop.run_in_executor(self._thread, classifier.explain, pixels[rows], classes[rows])
            heatmaps.append(await explaining)
        return np.concatenate(heatmaps)

    async def run(self) -> None:
        """Form batches and classify them until cancelled."""
        while True:
            await self._wait_for_batch()
            size = min(len(self._queue), self.policy.max_batch)
            batch = [image for image in (self._queue.popleft() for _ in range(size)) if not image.results.future.done()]
            if batch:
                await self._classify_batch(batch)

    async def _wait_for_batch(self) -> None:
        """Wait for the first image, then until the batch is full or the delay expires."""
        while not self._queue:
            self._arrival.clear()
            await self._arrival.wait()
        deadline = self._queue[0].arrival + self.policy.max_delay
        if self._loop.time() >= deadline:
            return
        self._expired = False
        timer = self._loop.call_at(deadline, self._expire)
        while len(self._queue) < self.policy.max_batch and not self._expired:
            self._arrival.clear()
            await self._arrival.wait()
        timer.cancel()

    def _expire(self) -> None:
        self._expired = True
        self._arrival.set()

    async def _classify_batch(self, batch: list[_QueuedImage]) -> None:
        classifier = self.classifier
        self._running = len(batch)
        try:
            pixels = np.stack([image.pixels for image in batch])
            probabilities = await self._run_model(classifier, pixels)
        except Exception as error:  # any failure belongs to these requests only
            for image in batch:
                image.results.fail(ConvolveError(f"model failed ({type(error).__name__}: {error})"))
            return
        finally:
            self._running = 0
        self._metrics.batches.observe(len(batch))
        self._metrics.count_images(self.name, len(batch))
        for image, row in zip(batch, probabilities, strict=True):
            image.results.set(image.index, (classifier, row))

    async def _run_model(self, classifier: Classifier, pixels: Images) -> Probabilities:
        """Classify in a thread, so the event loop continues. If both share one core, not for a short moment."""
        if self._one_core and self._image_seconds * len(pixels) < SHORT_SECONDS:
            return self._time_model(classifier, pixels)
        return await self._loop.run_in_executor(self._thread, self._time_model, classifier, pixels)

    def _time_model(self, classifier: Classifier, pixels: Images) -> Probabilities:
        start = time.perf_counter()
        probabilities = classifier.classify(pixels)
        self._image_seconds = (time.perf_counter() - start) / len(pixels)
        return probabilities

    def close(self) -> None:
        """Shut down the inference thread."""
        self._thread.shutdown(wait=False)
