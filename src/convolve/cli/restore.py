"""`convolve restore`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from convolve import device
from convolve.cli.command import Parser, add_section_flags, explicit_options, should_spawn, spawn_ranks
from convolve.cli.console import print_json
from convolve.compat.options import translate_program
from convolve.config.schema import SECTION_OF
from convolve.distributed.launch.local import follow_launcher
from convolve.distributed.topology import is_rank_zero

if TYPE_CHECKING:
    from convolve.runs.session import Changes


def read_options(arguments: Sequence[str]) -> Namespace:
    """The options of this verb."""
    parser = Parser(prog="convolve restore", description="Go on with a run exactly where it stopped.")
    parser.add_argument("run", type=Path, help="run folder")
    longer = parser.add_mutually_exclusive_group()
    longer.add_argument("--epochs", type=float, help="new length of the run in epochs: extends a finished run")
    longer.add_argument("--iterations", type=int, help="new length of the run in steps")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    add_section_flags(parser, "parallel")
    return parser.parse(translate_program("restore", arguments))


def read_changes(options: Namespace) -> Changes:
    """What differs from now on: the length of the run, and its layout."""
    from convolve.runs.session import Changes

    layout = {name: value for name, value in explicit_options(options).items() if SECTION_OF[name] == "parallel"}
    return Changes(options.epochs, options.iterations, layout)


def run(arguments: Sequence[str]) -> int:
    """Go on with a run, extend a finished one, or go on with it in another layout."""
    options = read_options(arguments)
    follow_launcher()
    device.prepare()

    from convolve.runs import session

    changes = read_changes(options)
    config = changes.apply(session.read_config(options.run))
    if should_spawn(config):
        return spawn_ranks(["restore", *arguments], config)
    from convolve.cli.console import PlainConsole, open_console, print_result

    console = PlainConsole() if options.json else open_console()
    report = session.resume(options.run, console, changes)
    code = print_result(report)
    if options.json and is_rank_zero():
        print_json(report)
    return code
