"""`convolve serve`: trained networks behind HTTP, each with the best checkpoint that its run has."""

import ipaddress
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from convolve import __version__
from convolve.app.assembly import choose_checkpoint, load_trained
from convolve.app.console import Console
from convolve.app.export import card_of
from convolve.checkpoint.manifest import MANIFEST_FILE
from convolve.checkpoint.store import CHECKPOINTS_FOLDER
from convolve.errors import ConfigError, ExtraError
from convolve.models.folding import fold_batch_norms
from convolve.serving.model import Model, Reload

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

    def reload(version: str | None) -> Model | None:
        nonlocal known
        path = choose_checkpoint(folder)
        mark = (path.name, (path / MANIFEST_FILE).stat().st_mtime_ns if (path / MANIFEST_FILE).exists() else 0)
        if version is not None and mark == known:
            return None
        trained = load_trained(path)
        _set_threads(threads)
        model = Model(name, path.name, card_of(trained), fold_batch_norms(trained.network))
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


def run(words: list[str], options: ServeOptions, console: Console) -> signal.Signals | None:
    """Serve until a signal comes."""
    check(options)
    named = parse_named(words)
    try:
        from convolve.serving.application import Server, Service, Settings
        from convolve.serving.server import run_server
    except ImportError as error:
        raise ExtraError(f"serve (module {error.name})", "serve") from None
    from convolve.serving.batcher import Pace
    from convolve.serving.requests import Limits

    services = {}
    for name, folder in named.items():
        reload = make_reload(name, folder, options.threads)
        model = reload(None)
        assert model is not None, "a first load gives a model"
        services[name] = Service(model, reload)
        console.say(f"{name}: {model.card.model} of {folder}, {model.version}, {len(model.card.classes)} classes")
    settings = Settings(
        limits=Limits(body_bytes=int(options.max_body_mb * 2**20), body_seconds=options.body_seconds),
        pace=Pace(options.max_delay_ms / 1000, options.max_batch, options.queue),
        token=options.token,
        hosts=LOCAL_NAMES if is_loopback(options.host) else None,
        runs=options.runs or _parent_of_runs(next(iter(named.values()))),
        reload_seconds=options.reload_seconds,
        version=__version__,
    )
    return run_server(Server(services, settings, console.say), options.host, options.port, console.say)


def _set_threads(threads: int | None) -> None:
    """The server's own choice of CPU threads, above that of the runs."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _parent_of_runs(folder: Path) -> Path:
    whole = folder.resolve()
    return whole.parents[2] if whole.parent.name == CHECKPOINTS_FOLDER else whole.parent
