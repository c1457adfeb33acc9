"""`convolve convert`."""

from collections.abc import Sequence
from pathlib import Path

from convolve.cli.command import Parser
from convolve.cli.console import format_bytes, print_json


def run(arguments: Sequence[str]) -> int:
    """Turn a pickled state dict into safetensors."""
    parser = Parser(
        prog="convolve convert",
        description="Turn a pickled state dict (.pth, .pt) of another library into a safetensors file.",
    )
    parser.add_argument("source", type=Path, help="file that torch.save wrote")
    parser.add_argument("target", type=Path, help="safetensors file to write")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse(arguments)

    from convolve.checkpoint import convert

    report = convert.convert(options.source, options.target)
    if options.json:
        print_json(report)
    else:
        print(f"{report.target}: {report.tensors} tensors, {format_bytes(report.bytes)}")
    return 0
