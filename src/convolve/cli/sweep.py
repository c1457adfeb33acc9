"""`convolve sweep`."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import convolve
from convolve.api.plots import check_plot_file
from convolve.cli.command import Parser, add_config_flags, add_loss_flag, explicit_options, read_config
from convolve.cli.console import open_console, print_json, print_table
from convolve.cli.train import photo_folder
from convolve.compat.options import translate
from convolve.errors import ConfigError
from convolve.loggers.streams import print_line

if TYPE_CHECKING:
    from convolve.api.sweep import SweepResult

USAGE = "convolve sweep [PHOTOS] [--grid OPTION=VALUES ...] [--option value ...]"
EPILOG = """examples:
  convolve sweep --config lenet-digits --grid learning-rate=0.01,0.1
  convolve sweep flowers                 three learning rates
  convolve sweep flowers --grid learning-rate=1e-4,1e-3,1e-2 --halving 3

--run-dir FOLDER --resume with the same options continues after an interruption."""


def run(argv: Sequence[str]) -> int:
    """Train once for each combination of option values, and print the runs, the best first."""
    parser = Parser("sweep", "Train once for each combination of option values.", usage=USAGE, epilog=EPILOG)
    parser.add_argument("photos", nargs="?", type=Path, metavar="PHOTOS", help="folder of photos, one folder per class")
    parser.add_argument(
        "--grid",
        nargs="+",
        action="extend",
        metavar="OPTION=VALUES",
        help="values to try, such as learning-rate=0.01,0.1 [three learning rates around the usual one]",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, each in a process [1]")
    parser.add_argument("--draws", type=int, metavar="N", help="train only N combinations, drawn by the seed [all]")
    parser.add_argument(
        "--halving",
        type=int,
        metavar="K",
        help="successive halving: train all for a part of the epochs, continue the best 1/K for K times as long, ...",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the accuracy and loss of all runs")
    add_loss_flag(parser)
    add_config_flags(parser, named_metrics=True)
    options = parser.parse(translate(argv, reserved=("jobs",)))
    grid = dict(map(_read_values, options.grid)) if options.grid else None
    if options.plot is not None:
        check_plot_file(options.plot)
    arguments = _arguments(options)
    convolve.prepare()
    with open_console(options.json) as console:
        given: dict[str, Any] = {name: getattr(options, name) for name in ("jobs", "draws", "halving", "loss")}
        given = {**given, "metrics": options.metric_names, **arguments}
        result = convolve.sweep(grid, **given, progress=console)
    if options.plot is not None:
        result.plot().save(options.plot)
    _print(result, options.json)
    return 0


def _arguments(options: Namespace) -> dict[str, Any]:
    """Return the data and options of `convolve.sweep`: those of a folder of photos, or of a config."""
    folder = photo_folder(options)
    if folder is None:
        return {"config": read_config(options, **({"data_dir": options.photos} if options.photos else {}))}
    return {"data": folder, **{name: value for name, value in explicit_options(options).items() if name != "data_dir"}}


def _read_values(word: str) -> tuple[str, list[str]]:
    name, equals, values = word.partition("=")
    if not equals or not values:
        raise ConfigError(f"--grid {word}: write OPTION=VALUE,VALUE, such as learning-rate=0.01,0.1")
    return name.lstrip("-").replace("-", "_"), values.split(",")


def _print(result: "SweepResult", as_json: bool) -> None:
    rows = list(zip(result.runs, result.options, result.accuracies, result.epochs, result.best_epochs, strict=True))
    if as_json:
        runs = [
            {"run": run.path, "options": given, "accuracy": accuracy, "epochs": epochs, "best_epoch": best}
            for run, given, accuracy, epochs, best in rows
        ]
        print_json({"folder": result.folder, "runs": runs})
        return
    cells = [
        (
            " ".join(f"{name}={value}" for name, value in given.items()),
            "" if accuracy is None else f"{accuracy:.2%}",
            "" if best is None else f"{best:g}",
            f"{epochs:g}",
        )
        for _, given, accuracy, epochs, best in rows
    ]
    print_table(("options", "validation", "at epoch", "trained epochs"), cells)
    best_run = result.best.path
    print_line(f"best run {best_run.relative_to(Path.cwd()) if best_run.is_relative_to(Path.cwd()) else best_run}")
