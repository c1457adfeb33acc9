"""The results of a request whose images are computed in several batches, or together with those of others."""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class PendingResults(Generic[T]):
    """Collects the results of the images of one request. `future` is done when all are known, or when one failed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self.future: asyncio.Future[list[T]] = loop.create_future()
        self._results: dict[int, T] = {}
        self._count = count

    def set(self, index: int, result: T) -> None:
        """Store the result of an image; the request may have ended before."""
        self._results[index] = result
        if len(self._results) == self._count and not self.future.done():
            self.future.set_result([self._results[number] for number in range(self._count)])

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        if not self.future.done():
            self.future.set_exception(error)
