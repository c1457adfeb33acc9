"""`convolve sweep`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import convolve
from convolve.cli.command import Parser, add_config_flags, read_config
from convolve.cli.console import print_json, print_table
from convolve.compat.options import translate
from convolve.errors import ConfigError

if TYPE_CHECKING:
    from convolve.api.search import SweepResult

USAGE = "convolve sweep --grid OPTION=VALUE,VALUE ... [--option value ...]"


def run(argv: Sequence[str]) -> int:
    """Train once for each combination of option values, and print the runs, the best first."""
    parser = Parser("sweep", "Train once for each combination of option values.", usage=USAGE)
    parser.add_argument(
        "--grid",
        nargs="+",
        required=True,
        metavar="OPTION=VALUES",
        help="values to try, such as learning-rate=0.01,0.1",
    )
    parser.add_argument("--draws", type=int, metavar="N", help="train only N combinations, drawn by the seed [all]")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the training loss of all runs")
    add_config_flags(parser)
    options = parser.parse(translate(argv))
    config, grid = read_config(options), dict(map(_read_values, options.grid))
    convolve.prepare()
    result = convolve.sweep(grid, config=config, draws=options.draws, progress=False)
    if options.plot is not None:
        result.plot().save(options.plot)
    _print(result, options.json)
    return 0


def _read_values(word: str) -> tuple[str, list[str]]:
    name, equals, values = word.partition("=")
    if not equals or not values:
        raise ConfigError(f"--grid {word}: write OPTION=VALUE,VALUE, such as learning-rate=0.01,0.1")
    return name.lstrip("-").replace("-", "_"), values.split(",")


def _print(result: "SweepResult", as_json: bool) -> None:
    rows = list(zip(result.runs, result.options, result.accuracies, strict=True))
    if as_json:
        runs = [{"run": run.path, "options": given, "test_accuracy": accuracy} for run, given, accuracy in rows]
        print_json({"runs": runs})
        return
    cells = [
        (
            " ".join(f"{name}={value}" for name, value in given.items()),
            "" if value is None else f"{value:.2%}",
            run.path,
        )
        for run, given, value in rows
    ]
    print_table(("options", "accuracy", "run"), cells)
