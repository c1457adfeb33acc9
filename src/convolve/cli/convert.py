"""`convolve convert`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import convolve
from convolve.cli.command import Parser
from convolve.cli.console import format_bytes, print_result

if TYPE_CHECKING:
    from convolve.checkpoint.convert import ConvertReport


def run(argv: Sequence[str]) -> int:
    """Convert a pickled state dict to safetensors."""
    parser = Parser("convert", "Convert a pickled state dict (.pth, .pt) of another library to a safetensors file.")
    parser.add_argument("source", type=Path, help="file written by torch.save")
    parser.add_argument("target", type=Path, help="safetensors file to write")
    options = parser.parse(argv)
    print_result(convolve.convert(options.source, options.target), options.json, _print_report)
    return 0


def _print_report(report: "ConvertReport") -> None:
    print(f"{report.target}: {report.tensors} tensors, {format_bytes(report.bytes)}")
