"""`convolve serve`: the uvicorn server around the application, and the options of the command.

On a signal the server drains: readiness fails and
connections are no longer kept alive, then it stops listening and finishes the requests in progress.
"""

import asyncio
import gc
import ipaddress
import re
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from convolve import __version__
from convolve.errors import ConfigError, ExtraError
from convolve.inference.classifier import Classifier, LoadOptions, choose_model, load_classifier, require_pixels
from convolve.inference.engines.base import describe
from convolve.inference.engines.factory import BATCH_SIZES
from convolve.inference.exported import is_exported
from convolve.loggers.base import Console
from convolve.run_files import CHECKPOINTS_FOLDER, MANIFEST_FILE
from convolve.serving.batcher import BatchPolicy
from convolve.serving.requests import Limits

try:
    import uvicorn

    from convolve.serving.app import Reload, ServedModel, Server, Settings
    from convolve.serving.connection import GuardedProtocol
except ImportError as error:
    raise ExtraError(f"serve (module {error.name})", "serve") from None

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
DRAIN_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 15
GC_OBJECTS = 20_000  # those of some hundred requests; Python's default of 700 are those of a few
SWITCH_SECONDS = 0.0005  # Python's default of 5 ms would delay every response while a forward pass runs


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains on the first signal and stops immediately on the second."""

    def __init__(self, config: uvicorn.Config, server: Server, on_start: Callable[[str], object]) -> None:
        super().__init__(config)
        self._server = server
        self._on_start = on_start
        self.stopped_by: signal.Signals | None = None

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            self._on_start(f"http://{shown}:{port}/")

    async def shutdown(self, sockets: Any = None) -> None:
        """Stop listening, but serve the connections in the kernel's backlog."""
        listeners = [listener.dup() for server in self.servers for listener in server.sockets]
        backlog = asyncio.create_task(self._accept_backlog(listeners))
        await super().shutdown(sockets=sockets)
        await backlog

    async def _accept_backlog(self, listeners: list[socket.socket]) -> None:
        """Accept the connections that the kernel established before listening stopped."""
        loop, config = asyncio.get_running_loop(), self.config
        protocol_class: Any = config.http_protocol_class

        def create_protocol() -> Any:
            return protocol_class(config, self.server_state, self.lifespan.state, loop)

        for listener in listeners:
            listener.setblocking(False)
            connections = []
            try:
                while True:
                    connections.append(listener.accept()[0])
            except OSError:
                listener.close()
            for connection in connections:
                connection.setblocking(False)
                await loop.connect_accepted_socket(create_protocol, connection)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stopped_by is not None:
            self.should_exit = self.force_exit = True
            return
        self.stopped_by = signal.Signals(sig)
        self._server.gate.draining = True
        asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._stop)

    def _stop(self) -> None:
        self.should_exit = True


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: every connection is a file."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_server(server: Server, host: str, port: int, on_start: Callable[[str], object]) -> signal.Signals | None:
    """Serve until a signal arrives, and return it. `on_start` gets the URL once the port is open."""
    raise_file_limit()
    warnings.filterwarnings("ignore", module="PIL")  # about odd metadata; the pixels are valid
    sys.setswitchinterval(SWITCH_SECONDS)
    limits = server.settings.limits
    config = uvicorn.Config(
        server.application(),
        host=host,
        port=port,
        http=type("LimitedProtocol", (GuardedProtocol,), {"limits": limits, "predict": server.predict}),
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(limits.request_seconds),
        backlog=2048,
    )
    draining_server = DrainingServer(config, server, on_start)
    gc.collect()
    gc.freeze()  # collections during requests need not look at models and modules
    gc.set_threshold(GC_OBJECTS)
    draining_server.run()
    return draining_server.stopped_by


@dataclass(frozen=True)
class ServeOptions:
    """Options of `convolve serve`. `reload_seconds` None disables reloading."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    max_batch: int = 64
    max_delay_ms: float = 0.0
    queue: int = 256
    max_body_mb: float = 16.0
    body_seconds: float = 10.0
    reload_seconds: float | None = 5.0
    runs: Path | None = None
    threads: int | None = None
    engine: str = "auto"


@dataclass(frozen=True)
class ServerInfo:
    """URL of a server that has started, and its models by name."""

    url: str
    models: dict[str, dict[str, Any]]


def parse_models(arguments: list[str]) -> dict[str, Path]:
    """Return runs or exported files by model name, from `NAME=RUN` or `RUN`; the latter is named after its folder."""
    folders: dict[str, Path] = {}
    for argument in arguments:
        name, separator, path = argument.partition("=")
        folder = Path(path if separator else argument)
        name = name if separator else folder.stem if is_exported(folder) else _run_folder(folder).name
        if not re.fullmatch(r"[\w.+@-]{1,80}", name):
            raise ConfigError(f"model name {name!r}: use letters, digits and . _ - + @, as in digits=runs/lenet-1")
        if name in folders:
            raise ConfigError(f"model name {name}: used twice; rename one with NAME=RUN")
        folders[name] = folder
    return folders


def _run_folder(folder: Path) -> Path:
    """Return the run folder of a run or checkpoint folder."""
    path = folder.resolve()
    return path.parents[1] if path.parent.name == CHECKPOINTS_FOLDER else path


def make_reload(folder: Path, load: LoadOptions) -> Reload:
    """Return a function that loads the run's best checkpoint, or a file, the first time and whenever it changes."""
    loaded: tuple[str, int] | None = None

    def reload() -> Classifier | None:
        nonlocal loaded
        path = choose_model(folder)
        changed = path if path.is_file() else path / MANIFEST_FILE
        signature = (path.name, changed.stat().st_mtime_ns if changed.exists() else 0)
        if signature == loaded:
            return None
        classifier = load_classifier(path, load)
        require_pixels(classifier.metadata, path)
        classifier.check()
        loaded = signature
        return classifier

    return reload


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach an address."""
    if host in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check(options: ServeOptions) -> None:
    """Reject unsafe or impossible options before anything is loaded."""
    if not is_loopback(options.host) and not options.token:
        raise ConfigError(f"--host {options.host}: reachable from other machines; add --token, or use 127.0.0.1")
    if options.token is not None and len(options.token) < 8:
        raise ConfigError("--token: must have at least 8 characters")
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port {options.port}: must be 0 to 65535")
    for name in ("max_batch", "queue", "max_body_mb", "body_seconds"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be greater than 0")
    if options.max_delay_ms < 0:
        raise ConfigError(f"--max-delay-ms {options.max_delay_ms}: must be 0 or more")


def _log_engine(console: Console, name: str, line: str) -> None:
    console.info(f"{name}: {line}")


def serve(
    arguments: list[str],
    options: ServeOptions,
    console: Console,
    on_start: Callable[[ServerInfo], object] = lambda info: None,
) -> signal.Signals | None:
    """Serve the models named by `[NAME=]RUN` arguments until a signal arrives, and return it."""
    check(options)
    folders = parse_models(arguments)
    models, loaded = {}, {}
    for name, folder in folders.items():
        sizes = [size for size in BATCH_SIZES if size < options.max_batch] + [options.max_batch]
        log = partial(_log_engine, console, name)
        reload = make_reload(folder, LoadOptions(options.engine, options.threads, sizes, log=log))
        classifier = reload()
        assert classifier is not None, "the first call always loads"
        models[name] = ServedModel(classifier, reload, None if is_exported(folder) else _run_folder(folder))
        model, version, classes = classifier.metadata.model, classifier.version, len(classifier.metadata.classes)
        engine = describe(classifier.engine)
        loaded[name] = {"model": model, "run": folder, "checkpoint": version, "classes": classes, "engine": engine}
        console.info(f"{name}: {model} of {folder}, {version}, {classes} classes")
    settings = Settings(
        limits=Limits(body_bytes=int(options.max_body_mb * 2**20), body_seconds=options.body_seconds),
        policy=BatchPolicy(options.max_delay_ms / 1000, options.max_batch, options.queue),
        token=options.token,
        hosts=LOCAL_NAMES if is_loopback(options.host) else None,
        runs=options.runs or _run_folder(next(iter(folders.values()))).parent,
        reload_seconds=options.reload_seconds,
        version=__version__,
    )
    server = Server(models, settings, console.info)
    return run_server(server, options.host, options.port, lambda url: on_start(ServerInfo(url, loaded)))
