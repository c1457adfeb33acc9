"""`convolve describe`."""

from collections.abc import Sequence
from pathlib import Path

from convolve import device
from convolve.cli.command import Parser
from convolve.cli.console import format_bytes, print_json, print_table

BARS = " ▁▂▃▄▅▆▇█"


def run(arguments: Sequence[str]) -> int:
    """Show the blocks of a network, and draw them if asked."""
    parser = Parser(prog="convolve describe", description="Layer table and drawing of a network.")
    parser.add_argument("what", nargs="?", help="network, named config or run folder; without it: the known networks")
    parser.add_argument("--graph", type=Path, metavar="FILE.svg", help="draw the network into this file")
    parser.add_argument("--schedule", action="store_true", help="draw the learning rate of a named config or a run")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse(arguments)

    device.prepare()

    from convolve.models.summary import name_size
    from convolve.runs import describe

    if options.what is None:
        networks = describe.list_models()
        print_json(networks) if options.json else print_table(("network", "what"), networks.items())
        return 0
    if options.schedule:
        return _show_schedule(options.what, options.json)
    found = describe.describe_model(options.what)
    if options.graph is not None:
        describe.write_svg(found, options.graph)
    if options.json:
        print_json(found)
        return 0
    headings = ("block", "kind", "output", "parameters", "multiply-adds", "activations")
    rows = [
        (
            row.name,
            row.kind,
            name_size(row.shape),
            row.parameters,
            row.multiply_adds,
            format_bytes(row.activation_bytes),
        )
        for row in found.rows
    ]
    print_table(headings, rows)
    print(
        f"{found.name}: {found.parameters:,} parameters, {found.multiply_adds:,} multiply-adds and "
        f"{format_bytes(found.activation_bytes)} of activations per image"
    )
    return 0


def _show_schedule(what: str, as_json: bool) -> int:

    from convolve.runs import describe

    curve = describe.trace_schedule(what)
    if as_json:
        print_json(curve)
        return 0
    for line in draw(curve.points):
        print(line)
    print(
        f"{curve.name}: {curve.schedule}, peak {curve.peak:g}, {curve.epochs:g} epochs, "
        f"global batch {curve.global_batch_size:,}"
    )
    return 0


def draw(points: Sequence[tuple[float, float]], columns: int = 66, rows: int = 12) -> list[str]:
    """A curve that begins at 0 as lines of text; each column is as high as the curve there, in eighths of a line."""
    top = max(rate for _, rate in points) or 1.0
    chosen = [points[round(index * (len(points) - 1) / (columns - 1))][1] for index in range(columns)]
    eighths = [round(8 * rows * rate / top) for rate in chosen]
    lines = []
    for row in range(rows - 1, -1, -1):
        label = f"{top * (row + 1) / rows:>9.3g} " if row % 4 == rows % 4 - 1 or row == rows - 1 else " " * 10
        lines.append(label + "|" + "".join(BARS[min(8, max(0, height - 8 * row))] for height in eighths).rstrip())
    end = f"{points[-1][0]:g} epochs"
    return [*lines, " " * 10 + "+" + "-" * columns, " " * 11 + "0" + end.rjust(columns - 1)]
