"""One sandbox that the event loop drives: it writes to and reads from the pipes itself.

A thread for each exchange would need two switches and the lock of the interpreter, which takes as long as decoding a
small image. Threads only start and stop the children, which takes longer.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Generic, TypeVar

from convolve.errors import SandboxError
from convolve.sandbox import TIMED_OUT, Call, Sandbox

T = TypeVar("T")


class Decoder(Generic[T]):
    """A sandbox for one call at a time. `read_result` raises SandboxError for a result that is garbage."""

    def __init__(self, sandbox: Sandbox, threads: Executor) -> None:
        self.sandbox = sandbox
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._watched: int | None = None
        self._call: Call | None = None

    async def start(self) -> None:
        """Start the child now, so the first call does not wait for it."""
        await self._loop.run_in_executor(self._threads, self.sandbox.start)

    def run(self, payload: bytes, seconds: float, read_result: Callable[[bytes], T]) -> "asyncio.Future[T]":
        """Call the child, and start it before if there is none. After a SandboxError, it is stopped."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._future, self._read_result = future, read_result
        if self.sandbox.running:
            self._begin(payload, seconds)
        else:
            starting = self._loop.run_in_executor(self._threads, self.sandbox.start)
            starting.add_done_callback(partial(self._begin_after_start, payload, seconds))
        return future

    def stop(self) -> None:
        """Cancel the call and kill the child. When no thread starts it anymore, close the sandbox."""
        if self._call is not None:
            self._end_call()
            self._future.cancel()
        self._unwatch()
        self.sandbox.kill()

    def _begin_after_start(self, payload: bytes, seconds: float, starting: "asyncio.Future[object]") -> None:
        if starting.cancelled() or self._future.cancelled():
            self._future.cancel()
        elif error := starting.exception():
            self._future.set_exception(error)
        else:
            self._begin(payload, seconds)

    def _begin(self, payload: bytes, seconds: float) -> None:
        self._call = call = self.sandbox.begin(payload)
        self._deadline = self._loop.call_later(seconds, self._fail, SandboxError(TIMED_OUT))
        if self._watched is None:
            self._watched = call.output
            self._loop.add_reader(call.output, self._receive)
        try:
            if not call.send():
                self._loop.add_writer(call.input, self._send)
        except SandboxError as error:
            self._fail(error)

    def _send(self) -> None:
        assert self._call is not None, "watched during a call only"
        try:
            if self._call.send():
                self._loop.remove_writer(self._call.input)
        except SandboxError as error:
            self._fail(error)

    def _receive(self) -> None:
        if self._call is None:  # the child died without one; the next call starts another
            self._unwatch()
            self.sandbox.close()
            return
        try:
            result = self._call.receive()
            if result is None:
                return
            found = self._read_result(result)
        except SandboxError as error:
            self._fail(error)
            return
        except Exception as error:
            self._end_call()
            self._future.set_exception(error)
            return
        self._end_call()
        self._future.set_result(found)

    def _fail(self, error: SandboxError) -> None:
        """Stop the child, then report the error: the next call needs a new child."""
        self._end_call()
        self._unwatch()
        closing = self._loop.run_in_executor(self._threads, self.sandbox.close)
        closing.add_done_callback(lambda _: self._report(error))

    def _report(self, error: SandboxError) -> None:
        if not self._future.done():  # canceled by `stop`
            self._future.set_exception(error)

    def _end_call(self) -> None:
        assert self._call is not None, "called once for each call"
        self._deadline.cancel()
        self._loop.remove_writer(self._call.input)
        self._call = None

    def _unwatch(self) -> None:
        if self._watched is not None:
            self._loop.remove_reader(self._watched)
            self._watched = None
