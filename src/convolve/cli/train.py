"""`convolve train`."""

from collections.abc import Sequence
from pathlib import Path

from convolve import device
from convolve.cli.flags import Parser, add_config_flags, asked_model, given_values
from convolve.cli.output import print_json
from convolve.config.loading import resolve
from convolve.config.spellings import translate
from convolve.parallel.launch import start_processes
from convolve.parallel.topology import Topology, launched, speaks

DEFAULT_CONFIG = "lenet-mnist"
USAGE = "convolve train [--config NAME] [--option value ...]     --model NAME --help puts that network's options first"
EPILOG = "`--x none` unsets an optional value. Without arguments: LeNet on MNIST."


def run(arguments: Sequence[str]) -> int:
    """Train a config and report its test accuracy."""
    parser = Parser(prog="convolve train", usage=USAGE, description="Train a network.", epilog=EPILOG)
    add_config_flags(parser, asked_model(arguments))
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse(translate(arguments))
    given = given_values(options)
    chosen = options.config or (None if "model" in given else DEFAULT_CONFIG)
    resolved = resolve(chosen, Path(options.config_path) if options.config_path else None, given)
    world = Topology(resolved.config.parallel.replicas, resolved.config.parallel.shards).world
    if world > 1 and not launched():
        return start_processes(world, ["train", *arguments])

    device.prepare()
    from convolve.app import train
    from convolve.cli.console import PlainConsole, open_console
    from convolve.cli.result import finish

    report = train.run(resolved.config, PlainConsole() if options.json else open_console())
    code = finish(report)
    if options.json and speaks():
        print_json(report)
    return code
