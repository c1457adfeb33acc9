"""`convolve export`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from convolve import device
from convolve.cli.command import Parser
from convolve.cli.console import format_bytes, print_json

if TYPE_CHECKING:
    from convolve.export.export import ExportReport


def run(arguments: Sequence[str]) -> int:
    """Export a trained network, and say what was compared."""
    parser = Parser(prog="convolve export", description="Write a trained network as a file for other programs.")
    parser.add_argument(
        "run", type=Path, help="run folder (its best checkpoint, or the newest) or one checkpoint folder"
    )
    parser.add_argument(
        "--format",
        default="onnx",
        metavar="NAME",
        help="onnx (also called frozen), pt2 (PyTorch), aoti (machine code for C++), safetensors (weights) [onnx]",
    )
    parser.add_argument("--int8", action="store_true", help="eight-bit weights and activations (onnx only)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write; unset: model.* in the run folder")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse(arguments)

    device.prepare()

    from convolve.cli.console import PlainConsole, open_console
    from convolve.export import export

    console = PlainConsole() if options.json else open_console()
    report = export.export(options.run, options.format, console, output=options.output, int8=options.int8)
    console.close()
    if options.json:
        print_json(report)
        return 0
    print(f"{report.path}: {format_bytes(report.bytes)} in {report.seconds:.1f} s; {_format_verification(report)}")
    return 0


def _format_verification(report: "ExportReport") -> str:
    if report.int8_accuracy is not None:
        return (
            f"accuracy {report.int8_accuracy:.2%}, float {report.accuracy:.2%} on {report.test_samples:,} test images"
        )
    if not report.batches:
        return "equal to the network bit for bit"
    return f"equal to the network at batch {', '.join(map(str, report.batches))} to {report.largest_difference:.1g}"
