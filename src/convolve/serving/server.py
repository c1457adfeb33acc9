"""The network side of the server: connections that say nothing are closed, and a signal drains before it ends."""

import asyncio
import functools
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from convolve.serving.application import Server
from convolve.serving.requests import Limits

DRAIN_SECONDS = 1.0
LAST_CALL_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 15
SWITCH_SECONDS = 0.0005  # Python's own 5 ms would be the least delay of any answer beside a busy network


class GuardedProtocol(HttpToolsProtocol):
    """One connection that must send a whole request head in time, and may be refused when there are too many."""

    limits = Limits()

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Take the connection, or close it if there are too many."""
        if len(self.connections) >= self.limits.connections:
            transport.abort()
            return
        super().connection_made(transport)
        self._start_clock()

    def data_received(self, data: bytes) -> None:
        """A new request begins its head: the clock runs until the head is complete."""
        if self.transport is None:
            return
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._start_clock()
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """The head is there; the limits of the body begin."""
        self._stop_clock()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_clock()
        if self.transport is not None:
            super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends: a request that is on its way over this connection is still answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            super().shutdown()
            return
        self._stop_clock()
        self._deadline = self.loop.call_later(LAST_CALL_SECONDS, self.transport.close)

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(self.limits.head_seconds, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def guard_connections(limits: Limits) -> type[GuardedProtocol]:
    """The protocol with some limits."""
    return type("LimitedProtocol", (GuardedProtocol,), {"limits": limits})


class DrainingServer(uvicorn.Server):
    """At a signal it first tells clients to leave (readyz fails, connections are not kept), and then stops."""

    def __init__(self, config: uvicorn.Config, server: Server, announce: Callable[[str], object]) -> None:
        super().__init__(config)
        self._server = server
        self._announce = announce
        self.stopped_by: signal.Signals | None = None

    async def startup(self, sockets: Any = None) -> None:
        """Open the port and say where."""
        await super().startup(sockets=sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            self._announce(f"serving on http://{shown}:{port}/")

    async def shutdown(self, sockets: Any = None) -> None:
        """Stop listening, but answer whoever was let into the line before."""
        spares = [one.dup() for server in self.servers for one in server.sockets]
        rest = asyncio.create_task(self._accept_rest(spares))
        await super().shutdown(sockets=sockets)
        await rest

    async def _accept_rest(self, listeners: list[socket.socket]) -> None:
        """Take the connections that the kernel had accepted already when listening ended."""
        loop, config = asyncio.get_running_loop(), self.config
        make: Any = config.http_protocol_class
        for listener in listeners:
            listener.setblocking(False)
            found = []
            try:
                while True:
                    found.append(listener.accept()[0])
            except OSError:
                listener.close()
            for connection in found:
                connection.setblocking(False)
                protocol = make(config, self.server_state, self.lifespan.state, loop)
                await loop.connect_accepted_socket(functools.partial(_itself, protocol), connection)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, stop at once at the second."""
        if self.stopped_by is not None:
            self.should_exit = self.force_exit = True
            return
        self.stopped_by = signal.Signals(sig)
        self._server.draining = True
        asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._stop)

    def _stop(self) -> None:
        self.should_exit = True


def _itself(protocol: Any) -> Any:
    return protocol


def allow_many_files() -> None:
    """Raise the soft limit of open files to the hard one: every connection is a file."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_server(server: Server, host: str, port: int, announce: Callable[[str], object]) -> signal.Signals | None:
    """Serve until a signal comes; returns it."""
    allow_many_files()
    warnings.filterwarnings("ignore", module="PIL")  # about odd metadata: the pixels count
    sys.setswitchinterval(SWITCH_SECONDS)
    limits = server.settings.limits
    config = uvicorn.Config(
        server.application(),
        host=host,
        port=port,
        http=guard_connections(limits),
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(limits.request_seconds),
        backlog=2048,
    )
    runner = DrainingServer(config, server, announce)
    runner.run()
    return runner.stopped_by
