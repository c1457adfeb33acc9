"""`convolve train`."""

from argparse import Namespace
from collections.abc import Sequence

from convolve import device
from convolve.cli.command import Parser, add_config_flags, asked_model, read_config, should_spawn, spawn_ranks
from convolve.cli.console import print_json
from convolve.compat.options import translate
from convolve.distributed.launch.local import follow_launcher
from convolve.distributed.topology import is_rank_zero

USAGE = "convolve train [--config NAME] [--option value ...]     --model NAME --help puts that network's options first"
EPILOG = "`--x none` unsets an optional value. Without arguments: LeNet on MNIST."


def read_options(arguments: Sequence[str]) -> Namespace:
    """The options of this verb."""
    parser = Parser(prog="convolve train", usage=USAGE, description="Train a network.", epilog=EPILOG)
    add_config_flags(parser, asked_model(arguments))
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    return parser.parse(translate(arguments))


def run(arguments: Sequence[str]) -> int:
    """Train a config and report its test accuracy."""
    options = read_options(arguments)
    config = read_config(options)
    if should_spawn(config):
        return spawn_ranks(["train", *arguments], config)

    follow_launcher()
    device.prepare()

    from convolve.cli.console import PlainConsole, open_console, print_result
    from convolve.runs import session

    report = session.train(config, PlainConsole() if options.json else open_console())
    code = print_result(report)
    if options.json and is_rank_zero():
        print_json(report)
    return code
