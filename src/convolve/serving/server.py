"""The network side of the server: connections that say nothing are closed, and a signal drains before it ends.

`convolve serve`: trained networks behind HTTP, each with the best checkpoint that its run has.
"""

import asyncio
import functools
import ipaddress
import re
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from convolve import __version__, device
from convolve.errors import ConfigError, ExtraError
from convolve.inference.classifier import Reload, ServableModel
from convolve.inference.metadata import metadata_of
from convolve.layers.fold import fold_batch_norms
from convolve.loggers.base import Console
from convolve.run_files import CHECKPOINTS_FOLDER, MANIFEST_FILE
from convolve.runs.load import choose_checkpoint, load_trained
from convolve.serving.app import Server
from convolve.serving.requests import Limits

DRAIN_SECONDS = 1.0
FINAL_WAIT_SECONDS = 0.5
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
        self._deadline = self.loop.call_later(FINAL_WAIT_SECONDS, self.transport.close)

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


LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class ServeOptions:
    """What the command line can say about a server."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    max_batch: int = 64
    max_delay_ms: float = 2.0
    queue: int = 256
    max_body_mb: float = 16.0
    body_seconds: float = 10.0
    reload_seconds: float | None = 5.0
    runs: Path | None = None
    threads: int | None = None


def parse_named(words: list[str]) -> dict[str, Path]:
    """Runs by name, from `NAME=RUN` or `RUN`, which is then named like its folder."""
    found: dict[str, Path] = {}
    for word in words:
        name, gap, path = word.partition("=")
        folder = Path(path if gap else word)
        name = name if gap else _name_of(folder)
        if not re.fullmatch(r"[\w.+@-]{1,80}", name):
            raise ConfigError(f"model name {name!r}: use letters, digits and . _ - + @, as in digits=runs/lenet-1")
        if name in found:
            raise ConfigError(f"model name {name}: given twice; name one of them with NAME=RUN")
        found[name] = folder
    return found


def _name_of(folder: Path) -> str:
    whole = folder.resolve()
    return whole.parent.parent.name if whole.parent.name == CHECKPOINTS_FOLDER else whole.name


def make_reload(name: str, folder: Path, threads: int | None = None) -> Reload:
    """A function that loads the run's best checkpoint when it is another one than before."""
    known: tuple[str, int] | None = None

    def reload(version: str | None) -> ServableModel | None:
        nonlocal known
        path = choose_checkpoint(folder)
        mark = (path.name, (path / MANIFEST_FILE).stat().st_mtime_ns if (path / MANIFEST_FILE).exists() else 0)
        if version is not None and mark == known:
            return None
        trained = load_trained(path)
        device.configure(threads or trained.config.run.threads)
        model = ServableModel(name, path.name, metadata_of(trained), fold_batch_norms(trained.network))
        model.warm_up()
        known = mark
        return model

    return reload


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check(options: ServeOptions) -> None:
    """Refuse what is unsafe or impossible before anything is loaded."""
    if not is_loopback(options.host) and not options.token:
        raise ConfigError(f"--host {options.host}: others could reach the server; give --token, or serve on 127.0.0.1")
    if options.token is not None and len(options.token) < 8:
        raise ConfigError("--token: must have 8 characters or more")
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port {options.port}: must be 0 to 65535")
    for name in ("max_batch", "queue", "max_body_mb", "body_seconds"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be greater than 0")
    if options.max_delay_ms < 0:
        raise ConfigError(f"--max-delay-ms {options.max_delay_ms}: must be 0 or more")


def serve(words: list[str], options: ServeOptions, console: Console) -> signal.Signals | None:
    """Serve until a signal comes."""
    check(options)
    named = parse_named(words)
    try:
        from convolve.serving.app import ServedModel, Server, Settings
    except ImportError as error:
        raise ExtraError(f"serve (module {error.name})", "serve") from None
    from convolve.serving.batcher import BatchPolicy
    from convolve.serving.requests import Limits

    services = {}
    for name, folder in named.items():
        reload = make_reload(name, folder, options.threads)
        model = reload(None)
        assert model is not None, "a first load gives a model"
        services[name] = ServedModel(model, reload)
        console.say(f"{name}: {model.card.model} of {folder}, {model.version}, {len(model.card.classes)} classes")
    settings = Settings(
        limits=Limits(body_bytes=int(options.max_body_mb * 2**20), body_seconds=options.body_seconds),
        pace=BatchPolicy(options.max_delay_ms / 1000, options.max_batch, options.queue),
        token=options.token,
        hosts=LOCAL_NAMES if is_loopback(options.host) else None,
        runs=options.runs or _parent_of_runs(next(iter(named.values()))),
        reload_seconds=options.reload_seconds,
        version=__version__,
    )
    return run_server(Server(services, settings, console.say), options.host, options.port, console.say)


def _parent_of_runs(folder: Path) -> Path:
    whole = folder.resolve()
    return whole.parents[2] if whole.parent.name == CHECKPOINTS_FOLDER else whole.parent
