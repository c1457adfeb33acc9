import asyncio

import pytest

from convolve.serving.deadline import Deadline, current_task


def test_a_wait_that_takes_too_long_is_ended():
    async def run():
        with pytest.raises(asyncio.TimeoutError), Deadline(current_task(), 0):
            await asyncio.Event().wait()
        await asyncio.sleep(0)  # the task continues

    asyncio.run(run())


def test_a_wait_that_ends_in_time_is_not_ended_later():
    async def run():
        with Deadline(current_task(), 0.01):
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)

    asyncio.run(run())


def test_a_cancellation_by_others_is_no_timeout():
    async def wait():
        with Deadline(current_task(), 60):
            await asyncio.Event().wait()

    async def run():
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
