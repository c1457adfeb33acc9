"""Dynamic batching: requests that arrive during a forward pass form the next batch.

A first image waits at most `max_delay` seconds for others, a batch has at most `max_batch` images, and at most `queue`
images wait. Further requests are rejected immediately instead of waiting in a growing queue, so no image waits longer
than about `queue / throughput`.
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
from convolve.errors import ConvolveError
from convolve.inference.classifier import Classifier, Probabilities
from convolve.inference.overlay import Heatmaps
from convolve.serving.metrics import Metrics
from convolve.serving.requests import OverloadedError

EXPLAINED_TOGETHER = 4


@dataclass(frozen=True)
class BatchPolicy:
    """Limits of dynamic batching: delay in seconds, images in a batch, images in the queue."""

    max_delay: float = 0.002
    max_batch: int = 64
    queue: int = 256


@dataclass(frozen=True)
class _QueuedImage:
    pixels: Images
    arrival: float
    result: "asyncio.Future[tuple[Classifier, Probabilities]]"


class Batcher:
    """Batches the requests of one model. `classifier` may be replaced at any time; running batches keep the old one."""

    def __init__(self, name: str, classifier: Classifier, policy: BatchPolicy, metrics: Metrics) -> None:
        self.name = name
        self.classifier = classifier
        self.policy = policy
        self._metrics = metrics
        self._queue: deque[_QueuedImage] = deque()
        self._arrival = asyncio.Event()
        self._running = 0
        self._admitted = 0
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

    async def classify(self, images: list[Images]) -> tuple[Classifier, Probabilities]:
        """Return the probabilities of some images and the classifier that computed the last of them."""
        if self.pending + len(images) > self.policy.queue:
            raise OverloadedError(f"{self.pending} images are queued; try again later")
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        queued = [_QueuedImage(pixels, now, loop.create_future()) for pixels in images]
        self._queue.extend(queued)
        self._arrival.set()
        results = await asyncio.gather(*(image.result for image in queued))
        return results[-1][0], np.stack([row for _, row in results])

    async def explain(self, classifier: Classifier, pixels: Images, probabilities: Probabilities) -> Heatmaps:
        """Return heatmaps of the predicted classes, computed in turn with the batches.

        A few images at a time: others need not wait for all of them, and a request that is canceled stops soon.
        """
        classes = probabilities.argmax(axis=1).astype(np.int64)
        loop, heatmaps = asyncio.get_running_loop(), []
        for start in range(0, len(pixels), EXPLAINED_TOGETHER):
            rows = slice(start, start + EXPLAINED_TOGETHER)
            heatmaps.append(await loop.run_in_executor(self._thread, classifier.explain, pixels[rows], classes[rows]))
        return np.concatenate(heatmaps)

    async def run(self) -> None:
        """Form batches and classify them until cancelled."""
        while True:
            await self._wait_for_batch()
            size = min(len(self._queue), self.policy.max_batch)
            batch = [image for image in (self._queue.popleft() for _ in range(size)) if not image.result.done()]
            if batch:
                await self._classify_batch(batch)

    async def _wait_for_batch(self) -> None:
        """Wait for the first image, then until the batch is full or the delay expires."""
        while not self._queue:
            self._arrival.clear()
            await self._arrival.wait()
        deadline = self._queue[0].arrival + self.policy.max_delay
        while len(self._queue) < self.policy.max_batch and (remaining := deadline - time.perf_counter()) > 0:
            self._arrival.clear()
            try:
                await asyncio.wait_for(self._arrival.wait(), remaining)
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                return

    async def _classify_batch(self, batch: list[_QueuedImage]) -> None:
        classifier, loop = self.classifier, asyncio.get_running_loop()
        self._running = len(batch)
        try:
            pixels = np.stack([image.pixels for image in batch])
            probabilities = await loop.run_in_executor(self._thread, classifier.classify, pixels)
        except Exception as error:  # any failure belongs to these requests only
            for image in batch:
                if not image.result.done():
                    image.result.set_exception(ConvolveError(f"model failed ({type(error).__name__}: {error})"))
            return
        finally:
            self._running = 0
        self._metrics.batches.observe(len(batch))
        self._metrics.count_images(self.name, len(batch))
        for image, row in zip(batch, probabilities, strict=True):
            if not image.result.done():
                image.result.set_result((classifier, row))

    def close(self) -> None:
        """Shut down the inference thread."""
        self._thread.shutdown(wait=False)
