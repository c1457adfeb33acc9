"""`convolve report`."""

from collections.abc import Sequence
from pathlib import Path

from convolve import device
from convolve.cli.command import Parser
from convolve.cli.console import print_json


def run(arguments: Sequence[str]) -> int:
    """Write a report, and say where it is."""
    parser = Parser(prog="convolve report", description="One self-contained HTML page about one run or several.")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders; several are shown side by side")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="page to write; unset: report.html in the run, or comparison.html"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse(arguments)

    device.prepare()
    from convolve.cli.console import PlainConsole, open_console
    from convolve.runs import report

    console = PlainConsole() if options.json else open_console()
    written = report.report(options.runs, console, output=options.output)
    console.close()
    if options.json:
        print_json(written)
        return 0
    for one in written.runs:
        if one.accuracy is not None:
            print(
                f"{one.run}: accuracy {one.accuracy:.2%}, calibration error {one.calibration_error:.2%}, "
                f"temperature {one.temperature:.3f}"
            )
    print(f"report written: {written.path}")
    return 0
