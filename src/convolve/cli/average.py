"""`convolve average`."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import convolve
from convolve.cli.command import Parser
from convolve.cli.console import open_console, print_json
from convolve.compat.programs import translate_program
from convolve.errors import ConfigError


def run(argv: Sequence[str]) -> int:
    """Average checkpoints of a run into a new one."""
    options = _read_options(argv)
    convolve.prepare()
    with open_console(options.json) as console:
        report = convolve.open(options.run).average(
            options.mode,
            count=options.count,
            decay=options.decay,
            discard_last=options.discard_last,
            statistics=options.statistics,
            filename=options.filename,
            progress=console,
        )
        if report.validation is not None:
            console.valid(report.validation)
    print(f"{report.path}: {len(report.checkpoints)} checkpoints, batch-norm statistics {report.statistics}")
    if options.json:
        print_json(report)
    return 0


def _read_options(argv: Sequence[str]) -> Namespace:
    parser = Parser("average", "Average several checkpoints of a run into one model.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument(
        "--mode",
        choices=("mean", "exponential", "ema"),
        required=True,
        help="mean, exponential average, or the running average that --ema-decay kept during training",
    )
    parser.add_argument("-N", dest="count", type=int, metavar="N", help="use only the last N checkpoints [all]")
    parser.add_argument(
        "--decay", type=float, default=0.99, metavar="X", help="decay of the exponential average [0.99]"
    )
    parser.add_argument("--discard-last", type=int, default=0, metavar="N", help="skip the newest N checkpoints [0]")
    parser.add_argument(
        "--statistics",
        choices=("measured", "averaged"),
        default="measured",
        help="batch-norm statistics: measured again on training images, or averaged [measured]",
    )
    parser.add_argument("--filename", metavar="NAME", help="name of the average [from the options above]")
    options = parser.parse(translate_program("average", argv))
    for flag, value, valid, rule in (
        ("-N", options.count, options.count is None or options.count >= 1, "at least 1"),
        ("--discard-last", options.discard_last, options.discard_last >= 0, "at least 0"),
        ("--decay", options.decay, 0 <= options.decay < 1, "at least 0 and below 1"),
    ):
        if not valid:
            raise ConfigError(f"{flag} {value}: must be {rule}")
    return options
