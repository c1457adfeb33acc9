"""`convolve serve`."""

import os
from collections.abc import Sequence
from pathlib import Path

from convolve import device
from convolve.cli.command import Parser
from convolve.errors import ConfigError

_NUMBERS: tuple[tuple[str, type, float | None, str], ...] = (
    ("port", int, 8000, "port; 0: any free one"),
    ("max-batch", int, 64, "most images in one pass of the network"),
    ("max-delay-ms", float, 2.0, "longest wait of a first image for company"),
    ("queue", int, 256, "most images that wait; more are answered 429"),
    ("max-body-mb", float, 16.0, "largest request"),
    ("body-seconds", float, 10.0, "longest time that a request may take to arrive"),
    ("threads", int, None, "CPU threads; unset: as the runs say"),
)


def run(arguments: Sequence[str]) -> int:
    """Serve trained networks until a signal comes."""
    parser = Parser(prog="convolve serve", description="Trained networks over HTTP, with a page to draw on at /.")
    parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help="run or checkpoint folders, each a model by name")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address; beyond this machine only with --token [127.0.0.1]"
    )
    parser.add_argument("--token", help="secret that clients send as `Authorization: Bearer`; also $CONVOLVE_TOKEN")
    for name, kind, default, what in _NUMBERS:
        shown = what if default is None else f"{what} [{default:g}]"
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=shown)
    parser.add_argument(
        "--reload", default="5", metavar="SECONDS", help="look for a better checkpoint; none: never [5]"
    )
    parser.add_argument("--runs-dir", type=Path, metavar="DIR", help="runs shown at /runs; unset: where the run lies")
    options = parser.parse([word for word in arguments if word != "--json"])

    device.prepare()
    from convolve.cli.console import PlainConsole
    from convolve.serving import server

    given = server.ServeOptions(
        host=options.host,
        port=options.port,
        token=options.token or os.environ.get("CONVOLVE_TOKEN") or None,
        max_batch=options.max_batch,
        max_delay_ms=options.max_delay_ms,
        queue=options.queue,
        max_body_mb=options.max_body_mb,
        body_seconds=options.body_seconds,
        reload_seconds=_seconds(options.reload),
        runs=options.runs_dir,
        threads=options.threads,
    )
    console = PlainConsole()
    stopped_by = server.serve(options.runs, given, console)
    if stopped_by is not None:
        console.info(f"stopped by {stopped_by.name}")
    return 0


def _seconds(text: str) -> float | None:
    if text == "none":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ConfigError(f"--reload {text}: must be seconds above 0, or none")
    return value
