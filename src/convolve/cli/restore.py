"""`convolve restore`."""

from collections.abc import Sequence
from pathlib import Path

from convolve import device
from convolve.cli.flags import Parser
from convolve.cli.output import print_json
from convolve.config.spellings import translate
from convolve.parallel.launch import start_processes
from convolve.parallel.topology import Topology, launched, speaks


def run(arguments: Sequence[str]) -> int:
    """Go on with a run, or extend a finished one."""
    parser = Parser(prog="convolve restore", description="Go on with a run exactly where it stopped.")
    parser.add_argument("run", type=Path, help="run folder")
    longer = parser.add_mutually_exclusive_group()
    longer.add_argument("--epochs", type=float, help="new length of the run in epochs: extends a finished run")
    longer.add_argument("--iterations", type=int, help="new length of the run in steps")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse(translate(arguments))

    device.prepare()
    from convolve.app import restore

    parallel = restore.read_config(options.run).parallel
    world = Topology(parallel.replicas, parallel.shards).world
    if world > 1 and not launched():
        return start_processes(world, ["restore", *arguments])
    from convolve.cli.console import PlainConsole, open_console
    from convolve.cli.result import finish

    console = PlainConsole() if options.json else open_console()
    report = restore.run(options.run, console, epochs=options.epochs, iterations=options.iterations)
    code = finish(report)
    if options.json and speaks():
        print_json(report)
    return code
