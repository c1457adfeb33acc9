"""The pieces of the server alone: batching, bodies, labels, metrics, reload."""

import asyncio
import time
from contextlib import ExitStack

import numpy as np
import pytest

from convolve.data.transforms.normalize import Transform
from convolve.errors import ConvolveError
from convolve.inference.metadata import ModelMetadata
from convolve.inference.preprocess import fit_photo
from convolve.runs.load import choose_checkpoint
from convolve.serving.batcher import Batcher, BatchPolicy, OverloadedError
from convolve.serving.metrics import Histogram, Metrics
from convolve.serving.requests import BodyReader, Limits, RequestError, clean_name, find_uploads
from convolve.serving.server import make_reload


class Slow:
    """A model that takes a while, and remembers the size of its batches."""

    def __init__(self, seconds=0.02):
        self.name, self.version, self.sizes, self.seconds = "slow", "1", [], seconds
        self.card = ModelMetadata("slow", ("a", "b"), Transform(2, 2, (0.0,), (1.0,)), "digit", 0, "")

    def classify(self, pixels):
        self.sizes.append(len(pixels))
        time.sleep(self.seconds)
        if pixels.max() == 255:
            raise RuntimeError("boom")
        return np.stack([pixels[:, 0, 0, 0], 255 - pixels[:, 0, 0, 0]], axis=1).astype(np.float32)


def in_loop(work):
    async def run():
        model = Slow()
        batcher = Batcher(model, BatchPolicy(delay=0.01, largest_batch=8, queue=40), Metrics())
        task = asyncio.create_task(batcher.run())
        try:
            return await work(batcher, model)
        finally:
            task.cancel()
            batcher.close()

    return asyncio.run(run())


def image(value):
    return np.full((2, 2, 1), value, np.uint8)


def test_what_arrives_together_is_answered_together_and_in_order():
    async def work(batcher, model):
        answers = await asyncio.gather(*(batcher.classify([image(n), image(n + 100)]) for n in range(16)))
        assert [list(shares[:, 0]) for _, shares in answers] == [[n, n + 100] for n in range(16)]
        assert model.sizes == [8, 8, 8, 8]

    in_loop(work)


def test_a_full_queue_refuses_at_once():
    async def work(batcher, model):
        first = [asyncio.create_task(batcher.classify([image(1)])) for _ in range(40)]
        await asyncio.sleep(0)
        began = time.perf_counter()
        with pytest.raises(OverloadedError, match="40 images are waiting already"):
            await batcher.classify([image(1)])
        assert time.perf_counter() - began < 0.05
        await asyncio.gather(*first)
        assert batcher.waiting == 0
        with ExitStack() as requests:
            for _ in range(40):
                requests.enter_context(batcher.admit())
            with pytest.raises(OverloadedError, match="40 requests are under way"), batcher.admit():
                pass
        with batcher.admit():
            pass

    in_loop(work)


def test_a_failing_batch_ends_its_own_requests_only():
    async def work(batcher, model):
        with pytest.raises(ConvolveError, match="the network failed"):
            await batcher.classify([image(255)])
        assert (await batcher.classify([image(3)]))[1][0, 0] == 3

    in_loop(work)


def test_a_reload_gives_a_model_once(digits_run):
    reload = make_reload("digits", digits_run)
    model = reload(None)
    assert model.version == choose_checkpoint(digits_run).name
    assert reload(model.version) is None


def test_a_refused_body_gives_its_memory_back_at_once():
    reader, bodies = BodyReader(Limits(body_bytes=100)), []

    async def chunks():
        for _ in range(5):
            yield b"x" * 40

    fill = reader._fill

    async def watched(body, pieces):
        bodies.append(body)
        await fill(body, pieces)

    reader._fill = watched
    with pytest.raises(RequestError):
        asyncio.run(reader.read(chunks(), None))
    assert reader.held == 0 and len(bodies[0]) == 0


def test_client_names_become_labels():
    assert clean_name("../../etc/passwd") == "passwd"
    assert clean_name("C:\\x\\y\x00z.png") == "yz.png"
    assert clean_name("..") == ".." and clean_name("") == "picture"


def test_a_histogram_counts_up():
    histogram = Histogram((1, 2))
    for value in (0.5, 1.5, 9):
        histogram.observe(value)
    assert list(histogram.lines("x")) == [
        'x_bucket{le="1"} 1', 'x_bucket{le="2"} 2', 'x_bucket{le="+Inf"} 3', "x_sum 11.000000", "x_count 3"
    ]  # fmt: skip


def test_random_bodies_never_crash_the_reader():
    random = np.random.default_rng(0)
    kinds = [
        "application/json",
        "multipart/form-data; boundary=a",
        "image/png",
        "",
        ";",
        "multipart/form-data; boundary=",
    ]
    for number in range(600):
        body = bytes(random.integers(0, 256, random.integers(0, 80), dtype=np.uint8)) + b'--a\r\n{"image"' * (
            number % 3
        )
        try:
            find_uploads(body, kinds[number % len(kinds)], Limits())
        except RequestError as error:
            assert error.status in (400, 413, 415)


def test_a_photograph_keeps_its_middle():
    photo = np.zeros((60, 100, 3), np.uint8)
    photo[:, 20:80] = 255
    transform = Transform(30, 30, (0.0,) * 3, (1.0,) * 3)
    small = fit_photo(photo, transform)
    assert small.shape == (30, 30, 3) and small.min() == 255
    assert fit_photo(small, transform) is small
