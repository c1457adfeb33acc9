"""`convolve validate`."""

from collections.abc import Sequence
from pathlib import Path

from convolve import device
from convolve.cli.flags import Parser
from convolve.cli.output import print_json


def run(arguments: Sequence[str]) -> int:
    """Validate stored checkpoints on every test image."""
    parser = Parser(prog="convolve validate", description="Test accuracy of stored checkpoints.")
    parser.add_argument("path", type=Path, help="run folder (its newest checkpoint) or one checkpoint folder")
    parser.add_argument("--all", action="store_true", help="every checkpoint of the run, in order")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse(arguments)

    device.prepare()
    from convolve.app import validate
    from convolve.cli.console import PlainConsole, open_console

    console = PlainConsole() if options.json else open_console()
    records = validate.run(options.path, console, every=options.all)
    console.close()
    if options.json:
        print_json(records)
    return 0
