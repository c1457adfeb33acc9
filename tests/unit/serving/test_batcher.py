import asyncio
import threading
from contextlib import ExitStack

import numpy as np
import pytest

from convolve.data.transforms.normalize import Transform
from convolve.errors import ConvolveError
from convolve.inference.metadata import ModelMetadata
from convolve.serving.batcher import SHORT_SECONDS, Batcher, BatchPolicy
from convolve.serving.metrics import Metrics
from convolve.serving.requests import OverloadedError


class FakeClassifier:
    """Waits for permission before each batch, records the batch sizes, and fails on white images."""

    def __init__(self):
        self.version, self.sizes, self.may_run = "1", [], threading.Event()
        self.metadata = ModelMetadata("fake", ("a", "b"), Transform(2, 2, (0.0,), (1.0,)), "digit", 0, "")

    def classify(self, pixels):
        self.sizes.append(len(pixels))
        assert self.may_run.wait(30)
        if pixels.max() == 255:
            raise RuntimeError("boom")
        return np.stack([pixels[:, 0, 0, 0], 255 - pixels[:, 0, 0, 0]], axis=1).astype(np.float32)


def run_with_batcher(test):
    async def run():
        classifier = FakeClassifier()
        batcher = Batcher("fake", classifier, BatchPolicy(max_delay=60, max_batch=8, queue=40), Metrics())
        task = asyncio.create_task(batcher.run())
        try:
            return await test(batcher, classifier)
        finally:
            classifier.may_run.set()
            task.cancel()
            batcher.close()

    return asyncio.run(run())


def image(value):
    return np.full((2, 2, 1), value, np.uint8)


def test_concurrent_requests_are_batched_and_get_their_results_in_order():
    async def test(batcher, classifier):
        classifier.may_run.set()
        results = await asyncio.gather(*(batcher.classify([image(n), image(n + 100)]) for n in range(16)))
        assert [[row[0] for row in rows] for _, rows in results] == [[n, n + 100] for n in range(16)]
        assert classifier.sizes == [8, 8, 8, 8]

    run_with_batcher(test)


def test_on_one_core_only_batches_that_are_not_short_run_in_a_thread():
    async def test(batcher, classifier):
        threads, classify = [], classifier.classify
        classifier.may_run.set()
        classifier.classify = lambda pixels: threads.append(threading.current_thread()) or classify(pixels)
        loop_thread = threading.current_thread()
        for one_core, seconds, inline in ((False, 0.0, False), (True, 0.0, True), (True, SHORT_SECONDS / 7, False)):
            batcher._one_core, batcher._image_seconds = one_core, seconds
            await batcher.classify([image(1)] * 8)
            assert (threads.pop() is loop_thread) is inline
            assert batcher._image_seconds > 0

    run_with_batcher(test)


def test_a_full_queue_rejects_requests_without_waiting():
    async def test(batcher, classifier):
        first = [asyncio.create_task(batcher.classify([image(1)])) for _ in range(40)]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="40 images are queued") as caught:
            await batcher.classify([image(1)])
        assert caught.value.status == 429
        classifier.may_run.set()
        await asyncio.gather(*first)
        assert batcher.pending == 0
        with ExitStack() as requests:
            for _ in range(40):
                requests.enter_context(batcher.admit())
            with pytest.raises(OverloadedError, match="40 requests are in progress"), batcher.admit():
                pass
        with batcher.admit():
            pass

    run_with_batcher(test)


def test_a_failing_batch_fails_only_its_requests():
    async def test(batcher, classifier):
        classifier.may_run.set()
        with pytest.raises(ConvolveError, match=r"model failed \(RuntimeError: boom\)"):
            await batcher.classify([image(255)] * 8)
        assert (await batcher.classify([image(3)] * 8))[1][0][0] == 3

    run_with_batcher(test)
