"""`convolve average`."""

from collections.abc import Sequence
from pathlib import Path

from convolve import device
from convolve.cli.command import Parser
from convolve.cli.console import print_json
from convolve.compat.options import translate_program


def run(arguments: Sequence[str]) -> int:
    """Average checkpoints of a run into a new one."""
    parser = Parser(prog="convolve average", description="One network from several checkpoints of a run.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument(
        "--mode",
        choices=("mean", "exponential", "ema"),
        required=True,
        help="mean, exponential, or the running average that --ema-decay kept while training",
    )
    parser.add_argument("-N", dest="count", type=int, metavar="N", help="only the last N checkpoints; unset: all")
    parser.add_argument("--decay", type=float, default=0.99, help="decay of the exponential average [0.99]")
    parser.add_argument("--discard-last", type=int, default=0, metavar="N", help="leave out the newest N [0]")
    parser.add_argument(
        "--statistics",
        choices=("measured", "averaged"),
        default="measured",
        help="batch-norm statistics: measured again on training images, or averaged too [measured]",
    )
    parser.add_argument("--filename", metavar="NAME", help="name of the average; unset: made of the above")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse(translate_program("average", arguments))
    if (options.count is not None and options.count < 1) or options.discard_last < 0 or not 0 <= options.decay < 1:
        parser.error("-N begins at 1, --discard-last at 0, and --decay lies between 0 and 1")

    device.prepare()

    from convolve.cli.console import PlainConsole, open_console
    from convolve.runs import average

    recipe = average.AverageRecipe(options.mode, options.count, options.decay, options.discard_last, options.statistics)
    console = PlainConsole() if options.json else open_console()
    report = average.average(options.run, recipe, console, name=options.filename)
    console.close()
    if report.validation is not None:
        console.valid(report.validation)
    print(f"{report.path}: {len(report.checkpoints)} checkpoints, batch-norm statistics {report.statistics}")
    if options.json:
        print_json(report)
    return 0
