"""`convolve describe`."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import convolve
from convolve.cli.command import Parser
from convolve.cli.console import format_bytes, print_result, print_table

if TYPE_CHECKING:
    from convolve.models.summary import ModelSummary
    from convolve.runs.describe import ScheduleCurve

BARS = " ▁▂▃▄▅▆▇█"


def run(argv: Sequence[str]) -> int:
    """Show the blocks of a model or its learning-rate curve, or list the models."""
    parser = Parser("describe", "Show the layers of a model as a table or drawing.")
    parser.add_argument("name", nargs="?", help="model, named config or run folder [list the models]")
    parser.add_argument("--graph", type=Path, metavar="FILE.svg", help="draw the model into this file")
    parser.add_argument("--schedule", action="store_true", help="draw the learning rate of a named config or run")
    _describe(parser.parse(argv))
    return 0


def _describe(options: Namespace) -> None:
    convolve.prepare()
    if options.name is None:
        models = {info.name: info.summary for info in convolve.models.list()}
        print_result(models, options.json, lambda models: print_table(("model", "summary"), models.items()))
    elif options.schedule:
        print_result(convolve.trace_schedule(options.name), options.json, _print_schedule)
    else:
        summary = convolve.models.describe(options.name, graph=options.graph)
        print_result(summary, options.json, _print_summary)


def _print_summary(summary: "ModelSummary") -> None:
    from convolve.models.summary import name_size

    rows = [
        (
            row.name,
            row.kind,
            name_size(row.shape),
            row.parameters,
            row.multiply_adds,
            format_bytes(row.activation_bytes),
        )
        for row in summary.rows
    ]
    print_table(("block", "kind", "output", "parameters", "multiply-adds", "activations"), rows)
    print(
        f"{summary.name}: {summary.parameters:,} parameters, {summary.multiply_adds:,} multiply-adds and "
        f"{format_bytes(summary.activation_bytes)} of activations per image"
    )


def _print_schedule(curve: "ScheduleCurve") -> None:
    print("\n".join(draw(curve.points)))
    print(
        f"{curve.name}: {curve.schedule}, peak {curve.peak:g}, {curve.epochs:g} epochs, "
        f"global batch {curve.global_batch_size:,}"
    )


def draw(points: Sequence[tuple[float, float]], columns: int = 66, rows: int = 12) -> list[str]:
    """Draw a curve from 0 as lines of text, with a resolution of one eighth of a line."""
    top = max(rate for _, rate in points) or 1.0
    chosen = [points[round(index * (len(points) - 1) / (columns - 1))][1] for index in range(columns)]
    eighths = [round(8 * rows * rate / top) for rate in chosen]
    lines = []
    for row in range(rows - 1, -1, -1):
        label = f"{top * (row + 1) / rows:>9.3g} " if row % 4 == rows % 4 - 1 or row == rows - 1 else " " * 10
        lines.append(label + "|" + "".join(BARS[min(8, max(0, height - 8 * row))] for height in eighths).rstrip())
    end = f"{points[-1][0]:g} epochs"
    return [*lines, " " * 10 + "+" + "-" * columns, " " * 11 + "0" + end.rjust(columns - 1)]
