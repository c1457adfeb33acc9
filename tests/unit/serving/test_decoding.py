"""The queue in front of the sandboxes: batches, and images that break their child without breaking the others."""

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from convolve.inference.decoding import DecodeRequest
from convolve.inference.preprocess import InputSpec
from convolve.serving import decoding
from convolve.serving.decoding import LIMITS, DecoderPool
from convolve.serving.requests import RequestError

pytest.importorskip("starlette", reason="the extra 'serve' is not installed")


@pytest.fixture(autouse=True)
def fragile_decoder_can_be_imported(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def request(value, name="a.png", side=8):
    file = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), value, np.uint8)).save(file, "PNG")
    return DecodeRequest(file.getvalue(), name, InputSpec("photo", side, side, 3, 1.0))


def run_with_pool(test):
    """Run a test with one decoder whose child dies of images named "die"; return the sizes of its batches."""
    sizes = []

    def noted(batch):
        sizes.append(len(batch))
        return batch

    async def run():
        pool = DecoderPool(1, "fragile_decoder:decode_or_die")
        pool.start()
        take_batch = pool._take_batch
        pool._take_batch = lambda: noted(take_batch())
        try:
            await test(pool)
        finally:
            pool.close()

    asyncio.run(run())
    return sizes


def test_concurrent_requests_are_decoded_together_and_get_their_images_in_order():
    async def test(pool):
        found = await asyncio.gather(*(pool.decode([request(n), request(n + 100)]) for n in range(6)))
        assert [[int(pixels[0, 0, 0]) for pixels in pair] for pair in found] == [[n, n + 100] for n in range(6)]

    assert run_with_pool(test) == [12]


def test_an_image_that_kills_its_child_fails_alone():
    async def test(pool):
        found = await pool.decode([request(1), request(2, "die"), request(3)])
        assert [isinstance(item, RequestError) for item in found] == [False, True, False]
        assert found[1].status == 413 and "die: cannot decode" in str(found[1])
        assert isinstance((await pool.decode([request(4)]))[0], np.ndarray)

    assert run_with_pool(test) == [3, 1, 1, 1, 1]


def test_large_uploads_and_those_of_other_models_are_not_decoded_together(monkeypatch):
    monkeypatch.setattr(decoding, "SMALL_BYTES", 1000)

    async def test(pool):
        large = DecodeRequest(request(5).data + bytes(2000), "large", request(5).spec)
        found = await pool.decode([request(1), request(2), large, request(3), request(4, side=9)])
        assert [int(pixels[0, 0, 0]) for pixels in found] == [1, 2, 5, 3, 4]

    assert run_with_pool(test) == [2, 1, 1, 1]


def test_a_batch_has_a_limit_of_pixels(monkeypatch):
    monkeypatch.setattr(decoding, "BATCH_PIXEL_BYTES", 3 * 8 * 8 * 3)

    async def test(pool):
        assert len(await pool.decode([request(n) for n in range(7)])) == 7

    assert run_with_pool(test) == [3, 3, 1]


def test_a_child_that_died_between_two_uploads_is_replaced():
    async def test(pool):
        await pool.decode([request(1)])
        (sandbox,) = pool._sandboxes
        sandbox.kill()
        while sandbox.running:
            await asyncio.sleep(0.01)
        assert int((await pool.decode([request(2)]))[0][0, 0, 0]) == 2

    assert run_with_pool(test) == [1, 1]


def test_uploads_that_are_larger_than_a_pipe_arrive_whole():
    async def test(pool):
        large = DecodeRequest(request(5).data + bytes(5 << 20), "large", request(5).spec)
        found = await pool.decode([large, request(1), large])
        assert [int(pixels[0, 0, 0]) for pixels in found] == [5, 1, 5]

    assert run_with_pool(test) == [1, 1, 1]


def test_an_image_that_takes_too_long_is_an_error_and_the_next_one_is_decoded(monkeypatch):
    monkeypatch.setattr(decoding, "LIMITS", replace(LIMITS, seconds=0.3))

    async def test(pool):
        (slow,) = await pool.decode([request(1, "sleep")])
        assert slow.status == 413 and "time limit reached" in str(slow)
        assert isinstance((await pool.decode([request(4)]))[0], np.ndarray)

    assert run_with_pool(test)[0] == 1


@pytest.mark.parametrize("begun", [True, False])
def test_closing_ends_what_is_being_decoded_and_what_waits(begun):
    async def test(pool):
        waiting = [asyncio.create_task(asyncio.wait_for(pool.decode([request(1, "sleep")]), 20)) for _ in range(2)]
        while begun and pool._decoders[0]._call is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        pool.close()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, RequestError) and result.status == 503

    run_with_pool(test)
