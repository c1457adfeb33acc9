"""`convolve export`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import convolve
from convolve.cli.command import Parser
from convolve.cli.console import format_bytes, open_console, print_result

if TYPE_CHECKING:
    from convolve.export.export import ExportReport

FORMATS = {
    "onnx": "alias frozen",
    "openvino": "IR",
    "litert": "TensorFlow Lite",
    "coreml": "Apple",
    "pt2": "PyTorch",
    "aoti": "machine code for C++",
    "safetensors": "weights",
}


def run(argv: Sequence[str]) -> int:
    """Export a trained model and print how it was verified."""
    parser = Parser("export", "Export a trained model to a file for other programs.")
    parser.add_argument("run", type=Path, help="run folder (its best checkpoint, or the newest) or checkpoint folder")
    formats = ", ".join(f"{name} ({text})" for name, text in FORMATS.items())
    parser.add_argument("--format", default="onnx", metavar="NAME", help=f"{formats} [onnx]")
    parser.add_argument(
        "--int8", action="store_true", help="quantize to 8 bits: weights and activations (onnx, openvino)"
    )
    parser.add_argument(
        "--max-accuracy-loss",
        type=float,
        default=0.01,
        metavar="X",
        help="int8: largest loss of accuracy on the test images; more is an error [0.01]",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write [model.* in the run folder]")
    options = parser.parse(argv)

    convolve.prepare()
    with open_console(options.json) as console:
        run = convolve.open(options.run)
        report = run.export(
            options.format,
            output=options.output,
            int8=options.int8,
            max_accuracy_loss=options.max_accuracy_loss,
            progress=console,
        )
    print_result(report, options.json, _print_report)
    return 0


def _print_report(report: "ExportReport") -> None:
    print(f"{report.path}: {format_bytes(report.bytes)} in {report.seconds:.1f} s; {_format_verification(report)}")


def _format_verification(report: "ExportReport") -> str:
    if report.int8_accuracy is not None:
        engines = ", ".join(f"{value:.2%} ({name})" for name, value in report.int8_accuracies.items())
        return f"accuracy {engines}, float {report.accuracy:.2%} on {report.test_samples:,} test images"
    if not report.executed:
        return "weights equal to the model bit for bit; not executed, Core ML runs on Apple's systems only"
    if not report.batches:
        return "equal to the model bit for bit"
    sizes = ", ".join(map(str, report.batches))
    return f"equal to the model at batch sizes {sizes} to {report.largest_difference:.1g}"
