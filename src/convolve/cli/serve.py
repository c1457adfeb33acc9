"""`convolve serve`."""

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import convolve
from convolve.cli.command import Parser, add_engine_flag
from convolve.cli.console import print_result
from convolve.errors import ConfigError
from convolve.loggers.terminal import PlainConsole

if TYPE_CHECKING:
    from convolve.serving.server import ServerInfo

_NUMBERS: tuple[tuple[str, type, float | None, str], ...] = (
    ("port", int, 8000, "port; 0 chooses a free one [8000]"),
    ("max-batch", int, 64, "largest batch of one forward pass [64]"),
    ("max-delay-ms", float, 0.0, "max wait for more requests before a batch runs, in ms [0]"),
    ("queue", int, 256, "max images waiting; further requests get status 429 [256]"),
    ("max-body-mb", float, 16.0, "max size of a request, in MiB [16]"),
    ("body-seconds", float, 10.0, "max time to receive a request body, in seconds [10]"),
    ("threads", int, None, "CPU threads [as in the runs]"),
)


def run(argv: Sequence[str]) -> int:
    """Serve trained models until a signal arrives."""
    options = _read_options(argv)
    convolve.prepare()
    from convolve.serving import server

    console = PlainConsole()
    serve_options = server.ServeOptions(
        host=options.host,
        port=options.port,
        token=options.token or os.environ.get("CONVOLVE_TOKEN") or None,
        max_batch=options.max_batch,
        max_delay_ms=options.max_delay_ms,
        queue=options.queue,
        max_body_mb=options.max_body_mb,
        body_seconds=options.body_seconds,
        reload_seconds=_parse_seconds(options.reload),
        runs=options.runs_dir,
        threads=options.threads,
        engine=options.engine,
    )

    def on_start(info: "ServerInfo") -> None:
        print_result(info, options.json, lambda info: print(f"serving on {info.url}", flush=True))

    stopped_by = convolve.serve(*options.runs, options=serve_options, on_start=on_start, progress=console)
    if stopped_by is not None and not options.json:
        print(f"stopped by {stopped_by.name}")
    return 0


def _read_options(argv: Sequence[str]) -> Namespace:
    parser = Parser("serve", "Serve trained models over HTTP, with a web page to draw on at /.")
    parser.add_argument(
        "runs", nargs="+", metavar="[NAME=]RUN", help="run or checkpoint folder, or .onnx or .xml file; repeat for more"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; others than local ones need --token [127.0.0.1]"
    )
    parser.add_argument("--token", help="secret that clients send as `Authorization: Bearer` [$CONVOLVE_TOKEN]")
    for name, kind, default, text in _NUMBERS:
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=text)
    parser.add_argument(
        "--reload", default="5", metavar="SECONDS", help="seconds between checks for a better checkpoint, or none [5]"
    )
    parser.add_argument(
        "--runs-dir", type=Path, metavar="DIR", help="folder of the runs shown at /runs [parent of the first run]"
    )
    add_engine_flag(parser, "auto")
    return parser.parse(argv)


def _parse_seconds(text: str) -> float | None:
    if text == "none":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ConfigError(f"--reload {text}: must be seconds above 0, or none")
    return value
