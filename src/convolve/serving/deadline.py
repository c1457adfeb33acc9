"""A time limit for a part of a task, without the task that `asyncio.wait_for` starts. Python 3.10 has no other."""

import asyncio
from types import TracebackType
from typing import Any


class Deadline:
    """Context that raises asyncio.TimeoutError if the `await`s of the current task inside take more than `seconds`."""

    def __init__(self, task: "asyncio.Task[Any]", seconds: float) -> None:
        self._task = task
        self._seconds = seconds
        self._expired = False

    def __enter__(self) -> None:
        self._timer = self._task.get_loop().call_later(self._seconds, self._expire)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        # From Python 3.11 on, a task counts its cancellations: one by someone else at the same time must remain.
        if self._expired and kind is asyncio.CancelledError and getattr(self._task, "uncancel", int)() == 0:
            raise asyncio.TimeoutError from error

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()


def current_task() -> "asyncio.Task[Any]":
    """Return the task that is running. Looking for it takes as long as starting a timer, so do it once."""
    task = asyncio.current_task()
    assert task is not None, "called by a coroutine"
    return task
