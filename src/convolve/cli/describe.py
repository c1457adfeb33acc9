"""`convolve describe`."""

from collections.abc import Sequence
from pathlib import Path

from convolve import device
from convolve.cli.flags import Parser
from convolve.cli.output import print_json, print_table, size


def run(arguments: Sequence[str]) -> int:
    """Show the blocks of a network, and draw them if asked."""
    parser = Parser(prog="convolve describe", description="Layer table and drawing of a network.")
    parser.add_argument("what", nargs="?", help="network, named config or run folder; without it: the known networks")
    parser.add_argument("--graph", type=Path, metavar="FILE.svg", help="draw the network into this file")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse(arguments)

    device.prepare()
    from convolve.app import describe
    from convolve.models.anatomy import name_size

    if options.what is None:
        networks = describe.list_networks()
        print_json(networks) if options.json else print_table(("network", "what"), networks.items())
        return 0
    found = describe.run(options.what)
    if options.graph is not None:
        describe.write_svg(found, options.graph)
    if options.json:
        print_json(found)
        return 0
    headings = ("block", "kind", "output", "parameters", "multiply-adds", "activations")
    rows = [
        (row.name, row.kind, name_size(row.shape), row.parameters, row.multiply_adds, size(row.activation_bytes))
        for row in found.rows
    ]
    print_table(headings, rows)
    print(
        f"{found.name}: {found.parameters:,} parameters, {found.multiply_adds:,} multiply-adds and "
        f"{size(found.activation_bytes)} of activations per image"
    )
    return 0
