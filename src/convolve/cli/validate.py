"""`convolve validate`."""

from collections.abc import Sequence
from pathlib import Path

import convolve
from convolve.cli.command import Parser
from convolve.cli.console import open_console, print_json
from convolve.compat.programs import translate_program
from convolve.errors import ConfigError


def run(argv: Sequence[str]) -> int:
    """Validate saved checkpoints on every test image."""
    parser = Parser("validate", "Compute the test accuracy of saved checkpoints.")
    parser.add_argument("path", type=Path, help="run folder (its newest checkpoint) or checkpoint folder")
    parser.add_argument("--all", action="store_true", help="validate every checkpoint of the run, in order")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="labeled folder to score [data of the run]")
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="samples per forward pass; does not change the result [chosen]"
    )
    options = parser.parse(translate_program("validate", argv))
    if options.batch_size is not None and options.batch_size < 1:
        raise ConfigError(f"--batch-size {options.batch_size}: must be at least 1")

    convolve.prepare()
    with open_console(options.json) as console:
        run = convolve.open(options.path)
        validate = run.validate_all if options.all else run.validate
        found = validate(options.data_dir, batch_size=options.batch_size, progress=console)
    records = found if isinstance(found, list) else [found]
    if options.json:
        print_json({"validations": records})
    return 0
