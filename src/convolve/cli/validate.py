"""`convolve validate`."""

from collections.abc import Sequence
from pathlib import Path

from convolve import device
from convolve.cli.command import Parser
from convolve.cli.console import print_json
from convolve.compat.options import translate_program


def run(arguments: Sequence[str]) -> int:
    """Validate stored checkpoints on every test image."""
    parser = Parser(prog="convolve validate", description="Test accuracy of stored checkpoints.")
    parser.add_argument("path", type=Path, help="run folder (its newest checkpoint) or one checkpoint folder")
    parser.add_argument("--all", action="store_true", help="every checkpoint of the run, in order")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where the data are now; unset: as in training")
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples per pass; never changes what is counted")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse(translate_program("validate", arguments))
    if options.batch_size is not None and options.batch_size < 1:
        parser.error(f"batch-size={options.batch_size}: must be at least 1")

    device.prepare()
    from convolve.cli.console import PlainConsole, open_console
    from convolve.runs import validate

    console = PlainConsole() if options.json else open_console()
    records = validate.validate(
        options.path, console, every=options.all, data_dir=options.data_dir, batch_size=options.batch_size
    )
    console.close()
    if options.json:
        print_json(records)
    return 0
