"""Decode uploads in sandboxes: a few children that can neither write, connect nor start processes.

An upload that crashes its child, or needs too much time or memory, costs that child and gets an error response. The
next upload gets a new child.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from convolve.confinement import Limits
from convolve.data.image_io import Images
from convolve.errors import DataError, ImageTooLargeError, SandboxError
from convolve.inference.preprocess import DecodeRequest
from convolve.sandbox import Sandbox
from convolve.serving.requests import RequestError

DECODERS = 2
LIMITS = Limits(memory_bytes=448 << 20, result_bytes=64 << 20, seconds=5.0)


class DecoderPool:
    """Sandboxes with a thread each."""

    def __init__(self, count: int = DECODERS) -> None:
        self._count = count
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="decode")
        self._local = threading.local()
        self._sandboxes: list[Sandbox] = []
        self._closed = False

    def start(self) -> None:
        """Start the children now, so the first uploads do not wait for them."""
        for _ in range(self._count):
            self._threads.submit(self._start)

    def submit(self, request: DecodeRequest) -> "Future[Images | RequestError]":
        """Decode an image. An error is returned, not raised: the other images of a request may be fine."""
        return self._threads.submit(self._decode, request)

    def close(self) -> None:
        """Kill the children, so a thread that waits for one ends, and wait for the threads."""
        self._closed = True
        for sandbox in self._sandboxes:
            sandbox.kill()
        self._threads.shutdown(cancel_futures=True)
        for sandbox in self._sandboxes:
            sandbox.close()

    def _start(self) -> None:
        if not self._closed:
            self._sandbox().start()

    def _decode(self, request: DecodeRequest) -> Images | RequestError:
        if self._closed:
            return RequestError(503, "shutting down")
        try:
            pixels = np.frombuffer(self._sandbox().call(request.pack()), np.uint8)
        except ImageTooLargeError as error:
            return RequestError(413, str(error))
        except DataError as error:
            return RequestError(400, str(error))
        except SandboxError as error:
            return RequestError(413, f"{request.name}: cannot decode ({error.problem})")
        return pixels.reshape(request.spec.height, request.spec.width, request.spec.channels)

    def _sandbox(self) -> Sandbox:
        sandbox: Sandbox | None = getattr(self._local, "sandbox", None)
        if sandbox is None:
            sandbox = self._local.sandbox = Sandbox("convolve.inference.preprocess:decode_input", LIMITS)
            self._sandboxes.append(sandbox)
        return sandbox
