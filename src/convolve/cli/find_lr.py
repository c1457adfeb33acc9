"""`convolve find-lr`."""

from collections.abc import Sequence
from pathlib import Path

import convolve
from convolve.cli.command import Parser, add_config_flags, add_loss_flag, read_config
from convolve.cli.console import print_json
from convolve.compat.options import translate

USAGE = "convolve find-lr [--option value ...]"


def run(argv: Sequence[str]) -> int:
    """Suggest a learning rate."""
    parser = Parser("find-lr", "Train some steps with a rising learning rate, and suggest one.", usage=USAGE)
    parser.add_argument("--low", type=float, default=1e-6, metavar="X", help="first learning rate [1e-6]")
    parser.add_argument("--high", type=float, default=1.0, metavar="X", help="last learning rate [1.0]")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="steps from low to high [100]")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the loss over the learning rate")
    add_loss_flag(parser)
    add_config_flags(parser)
    options = parser.parse(translate(argv, reserved=("steps",)))
    config = read_config(options)
    convolve.prepare()
    curve = convolve.find_lr(config=config, loss=options.loss, low=options.low, high=options.high, steps=options.steps)
    if options.plot is not None:
        curve.plot().save(options.plot)
    if options.json:
        print_json(curve)
    else:
        print(f"suggested learning rate {curve.suggestion:.3g}, after {len(curve.rates)} steps")
    return 0
