"""Decode uploads in sandboxes: a few children that can neither write, connect nor start processes.

Images that arrive while all children are busy form a batch, which costs one exchange with a child. An upload that
crashes its child, or needs too much time or memory, costs that child and gets an error response. It may not fail the
others of its batch: after such a failure each image is decoded alone. The next upload gets a new child.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from convolve.confinement import Limits
from convolve.data.image_io import Images
from convolve.errors import DataError, ImageTooLargeError, SandboxError
from convolve.inference.decoding import DecodeRequest, pack_requests, unpack_results
from convolve.sandbox import Sandbox
from convolve.serving.decoder import Decoder
from convolve.serving.pending import PendingResults
from convolve.serving.requests import RequestError

DECODERS = 2
LIMITS = Limits(memory_bytes=448 << 20, result_bytes=64 << 20, seconds=5.0)
# An image in a batch may hold up others, so a batch has little time, and only small images that rarely need more.
BATCH_SECONDS = 1.0
BATCH_IMAGES = 64
BATCH_PIXEL_BYTES = 16 << 20
SMALL_BYTES = 64 << 10

Decoded: TypeAlias = Images | RequestError
Found: TypeAlias = list[Images | DataError | None]


@dataclass(frozen=True)
class _QueuedUpload:
    request: DecodeRequest
    results: PendingResults[Decoded]
    index: int
    alone: bool

    def may_join(self, batch: "Sequence[_QueuedUpload]") -> bool:
        """Return True if this image can be decoded together with others."""
        spec, first = self.request.spec, batch[0]
        most = min(BATCH_IMAGES, BATCH_PIXEL_BYTES // (spec.height * spec.width * spec.channels))
        same = spec == first.request.spec and self.request.max_pixels == first.request.max_pixels
        return len(batch) < most and same and not self.alone and not first.alone


class DecoderPool:
    """Sandboxes, and the queue of uploads."""

    def __init__(self, count: int = DECODERS, function: str = "convolve.inference.decoding:decode_inputs") -> None:
        self._sandboxes = [Sandbox(function, LIMITS) for _ in range(count)]
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="decode")
        self._decoders: list[Decoder[Found]] = []
        self._idle: list[Decoder[Found]] = []
        self._queue: deque[_QueuedUpload] = deque()
        self._scheduled = False
        self._closed = False

    def start(self) -> None:
        """Start the children now, so the first uploads do not wait for them."""
        self._loop = asyncio.get_running_loop()
        self._decoders = [Decoder(sandbox, self._threads) for sandbox in self._sandboxes]
        for decoder in self._decoders:
            starting = self._loop.create_task(decoder.start())
            starting.add_done_callback(partial(self._release, decoder))

    def decode(self, requests: Sequence[DecodeRequest]) -> "asyncio.Future[list[Decoded]]":
        """Decode images. An error is returned, not raised: the other images of a request may be fine."""
        results: PendingResults[Decoded] = PendingResults(self._loop, len(requests))
        for index, request in enumerate(requests):
            self._queue.append(_QueuedUpload(request, results, index, len(request.data) > SMALL_BYTES))
        if not self._scheduled:  # after all requests that have already arrived
            self._scheduled = True
            self._loop.call_soon(self._dispatch)
        return results.future

    def close(self) -> None:
        """Kill the children, so a thread that waits for one ends, and wait for the threads. All requests fail."""
        self._closed = True
        for upload in self._queue:
            upload.results.fail(RequestError(503, "shutting down"))
        for decoder in self._decoders:
            decoder.stop()
        self._threads.shutdown(cancel_futures=True)
        for sandbox in self._sandboxes:
            sandbox.close()

    def _release(self, decoder: Decoder[Found], started: "asyncio.Future[None]") -> None:
        started.cancelled() or started.exception()  # a child that cannot start is reported to the first request
        self._idle.append(decoder)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give the queue to the idle decoders."""
        self._scheduled = False
        while self._queue and self._idle and not self._closed:
            batch = self._take_batch()
            if batch:
                decoder = self._idle.pop()
                seconds = LIMITS.seconds if len(batch) == 1 else BATCH_SECONDS
                unpack = partial(unpack_results, spec=batch[0].request.spec, count=len(batch))
                decoding = decoder.run(pack_requests([upload.request for upload in batch]), seconds, unpack)
                decoding.add_done_callback(partial(self._deliver, decoder, batch))

    def _take_batch(self) -> list[_QueuedUpload]:
        """Take images that can be decoded together, without those whose request has ended."""
        batch: list[_QueuedUpload] = []
        while self._queue and (not batch or self._queue[0].may_join(batch)):
            upload = self._queue.popleft()
            if not upload.results.future.done():
                batch.append(upload)
        return batch

    def _deliver(self, decoder: Decoder[Found], batch: list[_QueuedUpload], decoding: "asyncio.Future[Found]") -> None:
        self._idle.append(decoder)
        try:
            for upload, found in zip(batch, decoding.result(), strict=True):
                if found is None:  # not reached, since others took too long
                    self._queue.append(upload)
                else:
                    upload.results.set(upload.index, _to_response(found))
        except SandboxError as error:
            self._retry_alone(batch, error)
        except asyncio.CancelledError:  # by `close`
            for upload in batch:
                upload.results.fail(RequestError(503, "shutting down"))
        except Exception as error:
            for upload in batch:
                upload.results.fail(error)
        self._dispatch()

    def _retry_alone(self, batch: list[_QueuedUpload], error: SandboxError) -> None:
        """Find the image that made its batch fail."""
        if len(batch) > 1:
            self._queue.extend(replace(upload, alone=True) for upload in batch)
            return
        (upload,) = batch
        problem = f"{upload.request.name}: cannot decode ({error.problem})"
        upload.results.set(
            upload.index, RequestError(503, "shutting down") if self._closed else RequestError(413, problem)
        )


def _to_response(found: Images | DataError) -> Decoded:
    if isinstance(found, DataError):
        return RequestError(413 if isinstance(found, ImageTooLargeError) else 400, str(found))
    return found
