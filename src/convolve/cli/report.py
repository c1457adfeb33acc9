"""`convolve report`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import convolve
from convolve.cli.command import Parser
from convolve.cli.console import open_console, print_result

if TYPE_CHECKING:
    from convolve.runs.report import ReportResult


def run(argv: Sequence[str]) -> int:
    """Write a report and print its path."""
    parser = Parser("report", "Write one self-contained HTML page about one run or several.")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders; several are shown side by side")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="page to write [report.html in the run, or comparison.html]"
    )
    options = parser.parse(argv)

    convolve.prepare()
    with open_console(options.json) as console:
        result = convolve.report(*options.runs, output=options.output, progress=console)
    print_result(result, options.json, _print_report)
    return 0


def _print_report(result: "ReportResult") -> None:
    for run in result.runs:
        if run.mean_average_precision is not None:
            print(f"{run.run}: mean average precision {run.mean_average_precision:.2%}, accuracy {run.accuracy:.2%}")
        elif run.accuracy is not None:
            print(
                f"{run.run}: accuracy {run.accuracy:.2%}, calibration error {run.calibration_error:.2%}, "
                f"temperature {run.temperature:.3f}"
            )
    print(f"report written: {result.path}")
