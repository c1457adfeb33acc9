"""`convolve predict`."""

import argparse
import csv
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import convolve
from convolve import device
from convolve.cli.command import Parser, add_engine_flag
from convolve.cli.console import open_console, print_result, print_table
from convolve.compat.programs import translate_program
from convolve.errors import ConfigError
from convolve.files import write_file
from convolve.run_files import CALIBRATION_FILE

if TYPE_CHECKING:
    from convolve.inference.classifier import Prediction, PredictReport

TOP_CLASSES = 3
SEPARATOR = ";"


def run(argv: Sequence[str]) -> int:
    """Classify images; exit code 1 if any could not be read."""
    parser = Parser("predict", "Classify images with a trained model.")
    parser.add_argument("run", type=Path, help="run (its best checkpoint) or checkpoint folder, or .onnx or .xml file")
    parser.add_argument("images", type=Path, nargs="+", help="image files, or folders of them")
    parser.add_argument(
        "--invert",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="treat images as dark on light [detected for each image]",
    )
    parser.add_argument("--explain", type=Path, metavar="DIR", help="write images with heat maps to this folder")
    add_engine_flag(parser, "auto")
    parser.add_argument("--top", type=int, metavar="K", default=TOP_CLASSES, help=f"classes to show [{TOP_CLASSES}]")
    parser.add_argument(
        "--csv", action="store_true", help="print a table with commas: file, class or labels, probabilities"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table of --csv to a file")
    parser.add_argument(
        "--abstain",
        type=float,
        metavar="P",
        help="predict `unknown` if the calibrated probability is below P, in (0, 1)",
    )
    options = parser.parse(translate_program("predict", argv))
    _check(options)

    device.prepare()
    with open_console(options.json) as console:
        report = convolve.predict(
            options.run,
            options.images,
            invert=options.invert,
            explain=options.explain,
            engine=options.engine,
            progress=console,
        )
    if options.abstain is not None:
        report = _abstain(report, options.run, options.abstain)
    for failure in report.failures.values():
        print(f"convolve: {failure}", file=sys.stderr)
    report = _shorten(report, options.top) if options.csv or not options.json else report
    show = _csv_printer(options.output, options.top) if options.csv else _print_predictions
    print_result(report, options.json, show)
    return 1 if report.failures else 0


def _check(options: argparse.Namespace) -> None:
    if options.top < 1:
        raise ConfigError(f"--top {options.top}: must be at least 1")
    if options.abstain is not None and not 0 < options.abstain < 1:
        raise ConfigError(f"--abstain {options.abstain:g}: must be between 0 and 1, such as 0.8")
    if options.csv and options.json:
        raise ConfigError("--csv and --json: choose one format")
    if options.output is not None and not options.csv:
        raise ConfigError(f"--output {options.output}: only with --csv")


def _abstain(report: "PredictReport", run: Path, threshold: float) -> "PredictReport":
    from convolve.inference.abstention import abstain
    from convolve.runs.calibration import read_calibration

    if report.multi_label:
        raise ConfigError(f"--abstain {threshold:g}: a model of several labels predicts none if it is unsure; omit it")
    if run.is_file():
        raise ConfigError(f"--abstain {threshold:g}: {run} has no {CALIBRATION_FILE}; give the run folder")
    # A checkpoint is in a subfolder of its run.
    calibration = read_calibration(run) or read_calibration(run.parent.parent)
    if calibration is None:
        raise ConfigError(
            f"--abstain {threshold:g}: {run} has no {CALIBRATION_FILE}; write it with `convolve report {run}`"
        )
    return abstain(report, threshold, calibration.temperature)


def _shorten(report: "PredictReport", top: int) -> "PredictReport":
    """Return a report with the likeliest classes only."""
    predictions = [
        replace(prediction, probabilities=dict(list(prediction.probabilities.items())[:top]))
        for prediction in report.predictions
    ]
    return replace(report, predictions=predictions)


def _print_predictions(report: "PredictReport") -> None:
    rows = [
        (
            one.file,
            _name_labels(one, report),
            "  ".join(f"{label} {value:.1%}" for label, value in one.probabilities.items()),
        )
        for one in report.predictions
    ]
    print_table(("file", "labels" if report.multi_label else "class", "probabilities"), rows)


def _name_labels(prediction: "Prediction", report: "PredictReport") -> str:
    return SEPARATOR.join(prediction.labels) if report.multi_label else prediction.label


def _csv_printer(output: Path | None, top: int) -> Callable[["PredictReport"], None]:
    def print_csv(report: "PredictReport") -> None:
        text = format_csv(report, top)
        if output is None:
            sys.stdout.write(text)
        else:
            write_file(output, text.encode("utf-8", "surrogateescape"))
            failed = len(report.failures)
            unread = f", {failed:,} file{'s' * (failed > 1)} not read" if failed else ""
            print(f"{len(report.predictions):,} predictions{unread}; written: {output}")

    return print_csv


def format_csv(report: "PredictReport", top: int) -> str:
    """Return predictions as a table: the class, or the labels with semicolons between them, then the likeliest classes
    with their probabilities, then errors."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    what = "label" if report.multi_label else "class"
    pairs = [name for number in range(1, top + 1) for name in (f"{what}_{number}", f"probability_{number}")]
    writer.writerow(("file", "labels" if report.multi_label else "class", *pairs, "error"))
    for one in report.predictions:
        cells = [cell for label, value in one.probabilities.items() for cell in (label, f"{value:.4f}")]
        writer.writerow((one.file, _name_labels(one, report), *cells, *[""] * (len(pairs) - len(cells)), ""))
    for file, problem in report.failures.items():
        writer.writerow((file, "", *[""] * len(pairs), problem))
    return text.getvalue()
