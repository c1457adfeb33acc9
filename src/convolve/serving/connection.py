"""A connection: uvicorn's protocol with limits, and a short way to predictions.

Connections that do not send a complete header in time are closed. POST /predict does not pass ASGI: for a small model,
its messages and checks take as long as the model itself.
"""

import asyncio
from collections.abc import MutableMapping
from functools import lru_cache
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from convolve.serving.gate import RawHeaders
from convolve.serving.predict import PREDICT_PATH, PredictEndpoint
from convolve.serving.requests import Limits

FINAL_WAIT_SECONDS = 0.5
_PREDICT_URL = PREDICT_PATH.encode()
_CLOSE = (b"connection", b"close")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Exchange:
    """A POST /predict in progress, in the form of uvicorn's `RequestResponseCycle`, which its protocol fills."""

    def __init__(self, protocol: "GuardedProtocol", expects_continue: bool, keep_alive: bool) -> None:
        self.body = bytearray()
        self.more_body = True
        self.message_event = asyncio.Event()
        self.keep_alive = keep_alive
        self.disconnected = False
        self.response_complete = False
        self._protocol = protocol
        self._expects_continue = expects_continue

    async def receive(self) -> MutableMapping[str, Any]:
        """Return what has arrived of the body since the last call; wait if that is nothing. As in ASGI."""
        protocol = self._protocol
        if self._expects_continue and not protocol.transport.is_closing():
            self._expects_continue = False
            protocol.transport.write(_CONTINUE)
        while self.more_body and not self.body and not self.disconnected:
            protocol.flow.resume_reading()
            self.message_event.clear()
            await self.message_event.wait()
        if self.disconnected:
            return {"type": "http.disconnect"}
        received, self.body = self.body, bytearray()
        return {"type": "http.request", "body": bytes(received), "more_body": self.more_body}


class GuardedProtocol(HttpToolsProtocol):
    """A connection that must send a complete request header in time and within a size, limited in number."""

    limits = Limits()
    predict: PredictEndpoint
    _deadline: asyncio.TimerHandle | None = None
    _received = 0

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self.limits.connections:
            transport.abort()
            return
        super().connection_made(transport)
        self._start_timeout()

    def data_received(self, data: bytes) -> None:
        if self.transport is None:
            return
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._received = 0
        self._received += len(data)
        super().data_received(data)
        # The parser keeps headers before a handler can look at a token, and the trailers of a chunked body after it.
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # the header is not complete
            if self._received > self.limits.head_bytes:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
            elif self._deadline is None:
                self._start_timeout()
        elif self._received > self.limits.head_bytes + 2 * self.limits.body_bytes:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        self._cancel_timeout()
        path, _, query = self.url.partition(b"?")
        waits = self.cycle is not None and not self.cycle.response_complete
        if waits or path != _PREDICT_URL or self.parser.get_method() != b"POST":
            super().on_headers_complete()
            return
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        exchange = Exchange(self, self.expect_100_continue, keep_alive)
        self.cycle = cast(RequestResponseCycle, exchange)
        task = self.loop.create_task(self._predict(exchange, self.headers, query.partition(b"#")[0]))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _predict(self, exchange: Exchange, headers: RawHeaders, query: bytes) -> None:
        arrived = None if exchange.more_body else bytes(exchange.body)
        try:
            status, response_headers, body = await self.predict.respond(headers, query, exchange.receive, arrived)
        except Exception as error:  # as uvicorn does
            self.logger.error("Exception in POST /predict\n", exc_info=error)
            status, response_headers, body = 500, [_CLOSE], b"Internal Server Error"
        if self.flow.write_paused and not exchange.disconnected:
            await self.flow.drain()
        if not exchange.disconnected:
            self._respond(exchange, status, response_headers, body)

    def _respond(self, exchange: Exchange, status: int, headers: RawHeaders, body: bytes) -> None:
        if _CLOSE in headers:
            exchange.keep_alive = False
        elif not exchange.keep_alive:
            headers = [*headers, _CLOSE]
        lines = _encode_headers((*self.server_state.default_headers, *headers))
        self.transport.write(b"%b%bcontent-length: %d\r\n\r\n%b" % (STATUS_LINE[status], lines, len(body), body))
        exchange.response_complete = True
        if not exchange.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timeout()
        if self.transport is not None:
            super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close an idle connection after a short wait, so a request that is already on its way is still served."""
        if self.cycle is not None and not self.cycle.response_complete:
            super().shutdown()
            return
        self._cancel_timeout()
        self._deadline = self.loop.call_later(FINAL_WAIT_SECONDS, self.transport.close)

    def _start_timeout(self) -> None:
        self._deadline = self.loop.call_later(self.limits.head_seconds, self.transport.abort)

    def _cancel_timeout(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


@lru_cache(maxsize=64)
def _encode_headers(headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    """Return header lines. They are the same for a second, until the date changes."""
    return b"".join(b"%b: %b\r\n" % header for header in headers)
