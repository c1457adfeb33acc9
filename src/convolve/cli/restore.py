"""`convolve restore`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import convolve
from convolve.cli.command import (
    CODE_OPTIONS,
    Parser,
    add_callbacks_flag,
    add_loss_flag,
    add_metrics_flag,
    add_section_flags,
    explicit_options,
    should_spawn,
    spawn_ranks,
)
from convolve.cli.console import open_console, run_training
from convolve.compat.programs import translate_program
from convolve.config.schema import SECTION_OF
from convolve.distributed.launch.local import follow_launcher
from convolve.run_files import RECIPE_FILE

if TYPE_CHECKING:
    from convolve.runs.changes import Changes

USAGE = "convolve restore RUN [--epochs X | --iterations N] [--option value ...]"


def read_options(argv: Sequence[str]) -> Namespace:
    """Parse the options of this command."""
    summary = "Resume a run from its newest checkpoint; the result is that of an uninterrupted run."
    parser = Parser("restore", summary, usage=USAGE)
    parser.add_argument("run", type=Path, help="run folder")
    duration = parser.add_mutually_exclusive_group()
    duration.add_argument("--epochs", type=float, metavar="X", help="new length of the run in epochs")
    duration.add_argument("--iterations", type=int, metavar="N", help="new length of the run in steps")
    add_loss_flag(parser)
    add_metrics_flag(parser)
    add_callbacks_flag(parser)
    add_section_flags(parser, "parallel")
    return parser.parse(translate_program("restore", argv))


def read_changes(options: Namespace) -> Changes:
    """Return what differs from the stored config: the length of the run and its layout."""
    from convolve.runs.changes import Changes

    layout = {name: value for name, value in explicit_options(options).items() if SECTION_OF[name] == "parallel"}
    return Changes(options.epochs, options.iterations, layout)


def run(argv: Sequence[str]) -> int:
    """Resume a run, extend a finished one, or continue in another layout."""
    options = read_options(argv)
    follow_launcher()
    convolve.prepare()
    run, changes = convolve.open(options.run), read_changes(options)
    config = changes.apply(run.config)
    if should_spawn(config):
        return spawn_ranks(["restore", *argv], config)
    given: Any = {"epochs": options.epochs, "iterations": options.iterations, **changes.parallel}
    given |= {"loss": options.loss, "metrics": options.metric_names}
    given |= {name: value for name in CODE_OPTIONS["restore"] if (value := getattr(options, name)) is not None}
    with open_console(options.json, photos=(options.run / RECIPE_FILE).is_file()) as console:
        return run_training(lambda: run.resume(callbacks=options.callbacks, progress=console, **given), options.json)
