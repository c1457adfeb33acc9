"""`convolve predict`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from convolve import device
from convolve.cli.command import Parser
from convolve.cli.console import print_json, print_table
from convolve.compat.options import translate_program

SHOWN = 3


def run(arguments: Sequence[str]) -> int:
    """Classify pictures; exit 1 if any could not be read."""
    parser = Parser(prog="convolve predict", description="Classify pictures with a trained network.")
    parser.add_argument(
        "run", type=Path, help="run folder (its best checkpoint, or the newest) or one checkpoint folder"
    )
    parser.add_argument("pictures", type=Path, nargs="+", help="picture files or folders of them")
    parser.add_argument(
        "--invert",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="treat pictures as dark on light; unset: found out from each picture",
    )
    parser.add_argument("--explain", type=Path, metavar="DIR", help="write Grad-CAM pictures there: where it looks")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse(translate_program("predict", arguments))

    device.prepare()
    from convolve.cli.console import PlainConsole, open_console
    from convolve.inference import classifier

    console = PlainConsole() if options.json else open_console()
    report = classifier.predict(
        options.run, options.pictures, console, invert=options.invert, explain_dir=options.explain
    )
    console.close()
    for failure in report.failures.values():
        print(f"convolve: {failure}", file=sys.stderr)
    if options.json:
        print_json(report.predictions)
    else:
        print_table(
            ("file", "class", "probabilities"),
            [
                (one.file, one.label, "  ".join(f"{name} {share:.1%}" for name, share in _top(one.probabilities)))
                for one in report.predictions
            ],
        )
    return 1 if report.failures else 0


def _top(probabilities: dict[str, float]) -> list[tuple[str, float]]:
    return list(probabilities.items())[:SHOWN]
