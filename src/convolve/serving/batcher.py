"""Dynamic batching: what arrives while the network works becomes its next batch.

A first image waits at most `delay` for company, a batch has at most `largest_batch` images, and at most `queue` images
wait. More are refused at once: a client that is told to come back is better off than one that waits in a queue that
only grows. With `queue / throughput` the longest wait is known in advance.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from convolve.data.dataset import Images
from convolve.errors import ConvolveError
from convolve.inference.classifier import Probabilities, ServableModel
from convolve.serving.metrics import Metrics


class OverloadedError(ConvolveError):
    """More images are waiting than the server accepts."""


@dataclass(frozen=True)
class BatchPolicy:
    """How a batcher gathers: seconds of patience, images in a batch, images that may wait."""

    delay: float = 0.002
    largest_batch: int = 64
    queue: int = 256


@dataclass(frozen=True)
class _Waiting:
    pixels: Images
    since: float
    answer: "asyncio.Future[tuple[ServableModel, Probabilities]]"


class Batcher:
    """Feeds one model. `model` may be replaced at any time; the batch under way ends with the one it began with."""

    def __init__(self, model: ServableModel, pace: BatchPolicy, metrics: Metrics) -> None:
        self.model = model
        self.pace = pace
        self._metrics = metrics
        self._line: deque[_Waiting] = deque()
        self._arrival = asyncio.Event()
        self._running = 0
        self._admitted = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"model-{model.name}")

    @property
    def waiting(self) -> int:
        """Images that wait or are being classified."""
        return len(self._line) + self._running

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Room for one request, from its head to its answer; without room it is refused before its body is read."""
        if self._admitted >= self.pace.queue:
            raise OverloadedError(f"{self._admitted} requests are under way already; try again later")
        self._admitted += 1
        try:
            yield
        finally:
            self._admitted -= 1

    async def classify(self, images: list[Images]) -> tuple[ServableModel, Probabilities]:
        """Probabilities for some images, and the model that gave them (one model for all of them)."""
        if self.waiting + len(images) > self.pace.queue:
            raise OverloadedError(f"{self.waiting} images are waiting already; try again later")
        loop, now = asyncio.get_running_loop(), time.perf_counter()
        waiting = [_Waiting(pixels, now, loop.create_future()) for pixels in images]
        self._line.extend(waiting)
        self._arrival.set()
        answers = await asyncio.gather(*(one.answer for one in waiting))
        return answers[-1][0], np.stack([shares for _, shares in answers])

    async def explain(self, model: ServableModel, images: Images, shares: Probabilities) -> Images:
        """Heat maps for the answers given, in turn with the batches."""
        answers = shares.argmax(axis=1).astype(np.int64)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, model.explain, images, answers)  # type: ignore[arg-type]

    async def run(self) -> None:
        """Form batches and answer them, for ever."""
        while True:
            await self._gather()
            batch = [self._line.popleft() for _ in range(min(len(self._line), self.pace.largest_batch))]
            batch = [one for one in batch if not one.answer.done()]
            if batch:
                await self._answer(batch)

    async def _gather(self) -> None:
        """Wait for a first image, and then for company until the batch is full or patience ends."""
        while not self._line:
            self._arrival.clear()
            await self._arrival.wait()
        end = self._line[0].since + self.pace.delay
        while self._line and len(self._line) < self.pace.largest_batch and (left := end - time.perf_counter()) > 0:
            self._arrival.clear()
            try:
                await asyncio.wait_for(self._arrival.wait(), left)
            except TimeoutError:
                return
            except asyncio.TimeoutError:  # another class before Python 3.11
                return

    async def _answer(self, batch: list[_Waiting]) -> None:
        model, loop = self.model, asyncio.get_running_loop()
        self._running = len(batch)
        try:
            pixels = np.stack([one.pixels for one in batch])
            shares = await loop.run_in_executor(self._thread, model.classify, pixels)
        except Exception as error:  # whatever it is, it belongs to these requests, and the others must go on
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(ConvolveError(f"the network failed ({type(error).__name__}: {error})"))
            return
        finally:
            self._running = 0
        self._metrics.batches.observe(len(batch))
        self._metrics.classified(model.name, len(batch))
        for one, row in zip(batch, shares, strict=True):
            if not one.answer.done():
                one.answer.set_result((model, row))

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False)
