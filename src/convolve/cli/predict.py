"""`convolve predict`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from convolve import device
from convolve.cli.command import Parser, add_engine_flag
from convolve.cli.console import open_console, print_result, print_table
from convolve.compat.programs import translate_program

if TYPE_CHECKING:
    from convolve.inference.classifier import PredictReport

TOP_CLASSES = 3


def run(argv: Sequence[str]) -> int:
    """Classify images; exit code 1 if any could not be read."""
    parser = Parser("predict", "Classify images with a trained model.")
    parser.add_argument("run", type=Path, help="run folder (its best checkpoint), checkpoint folder or ONNX file")
    parser.add_argument("images", type=Path, nargs="+", help="image files, or folders of them")
    parser.add_argument(
        "--invert",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="treat images as dark on light [detected for each image]",
    )
    parser.add_argument("--explain", type=Path, metavar="DIR", help="write Grad-CAM heat maps to this folder")
    add_engine_flag(parser, "auto")
    options = parser.parse(translate_program("predict", argv))

    device.prepare()
    from convolve.inference import classifier

    with open_console(options.json) as console:
        report = classifier.predict(
            options.run,
            options.images,
            console,
            invert=options.invert,
            explain_dir=options.explain,
            engine=options.engine,
        )
    for failure in report.failures.values():
        print(f"convolve: {failure}", file=sys.stderr)
    print_result(report, options.json, _print_predictions)
    return 1 if report.failures else 0


def _print_predictions(report: "PredictReport") -> None:
    rows = []
    for prediction in report.predictions:
        top = list(prediction.probabilities.items())[:TOP_CLASSES]
        rows.append((prediction.file, prediction.label, "  ".join(f"{label} {value:.1%}" for label, value in top)))
    print_table(("file", "class", "probabilities"), rows)
