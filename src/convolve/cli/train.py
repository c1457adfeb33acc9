"""`convolve train`."""

from argparse import Namespace
from collections.abc import Sequence

import convolve
from convolve.cli.command import (
    Parser,
    add_config_flags,
    model_in,
    read_config,
    should_spawn,
    spawn_ranks,
    translate_options,
)
from convolve.cli.console import finish_folds, open_console, run_training
from convolve.distributed.launch.local import follow_launcher

USAGE = "convolve train [--config NAME] [--option value ...]     --model NAME --help lists that model's options first"
EPILOG = "`--option none` unsets an optional value. Without arguments: LeNet on MNIST."


def read_options(argv: Sequence[str]) -> Namespace:
    """Parse the options of this command."""
    parser = Parser("train", "Train a model.", usage=USAGE, epilog=EPILOG)
    add_config_flags(parser, model_in(argv))
    return parser.parse(translate_options(argv))


def run(argv: Sequence[str]) -> int:
    """Train a config and print its test accuracy."""
    options = read_options(argv)
    config = read_config(options)
    if should_spawn(config):
        return spawn_ranks(["train", *argv], config)

    follow_launcher()
    convolve.prepare()
    from convolve.runs import folds

    with open_console(options.json) as console:
        if folds.is_cross_validation(config):
            return finish_folds(folds.train_folds(config, console), options.json)
        return run_training(lambda: convolve.train(config=config, progress=console), options.json)
