"""`convolve align`."""

from collections.abc import Sequence
from pathlib import Path

from convolve import device
from convolve.cli.command import Parser, add_config_flags, explicit_options
from convolve.cli.console import print_json, print_table
from convolve.compat.options import translate
from convolve.config.loading import resolve

DEFAULT_CONFIG = "lenet-mnist"
DESCRIPTION = "Train one config in several number formats (or compare finished runs) and say where and why they part."


def _parser() -> Parser:
    parser = Parser(prog="convolve align", description=DESCRIPTION)
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="finished runs to compare instead of training"
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["32.32", "16.32", "16.16"],
        metavar="POLICY",
        help="the reference first; such as 16.16, 16.16:nearest, 16.32:bf16:half-partials or ipu-mk2",
    )
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="trainings of each policy, with rising seeds")
    parser.add_argument("--walk-steps", type=int, default=20, metavar="N", help="steps compared layer by layer [20]")
    parser.add_argument(
        "--tolerance", type=float, default=0.1, metavar="X", help="relative error that parts them [0.1]"
    )
    parser.add_argument("--points", type=float, default=0.15, metavar="X", help="accuracy points that agree [0.15]")
    parser.add_argument("--out", type=Path, default=Path("align"), metavar="DIR", help="folder of the report [align]")
    add_config_flags(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    return parser


def run(arguments: Sequence[str]) -> int:
    """Compare number formats and print the verdict."""
    options = _parser().parse(translate(arguments))
    given = explicit_options(options)
    chosen = options.config or (None if "model" in given else DEFAULT_CONFIG)
    config = resolve(chosen, Path(options.config_path) if options.config_path else None, given).config

    device.prepare()
    from convolve.alignment import align
    from convolve.cli.console import PlainConsole, open_console

    console = PlainConsole() if options.json else open_console()
    plan = align.AlignPlan(
        tuple(options.policies), options.seeds, options.walk_steps, options.tolerance, options.points
    )
    if options.runs:
        report = align.compare_runs(options.runs, plan, options.out, console)
    else:
        report = align.align(config, plan, options.out, console)
    console.close()
    _show(report.candidates, report.verdict, report.page)
    if options.json:
        print_json({"verdict": report.verdict, "page": report.page, "candidates": [
            align.to_plain(one) for one in report.candidates
        ]})  # fmt: skip
    return 0


def _show(candidates: Sequence[object], verdict: str, page: Path) -> None:
    from convolve.alignment.align import PolicyResult

    rows = []
    for one in candidates:
        assert isinstance(one, PolicyResult), "the report holds candidates"
        parting = one.parting
        rows.append(
            (
                one.name,
                one.policy,
                "-" if one.accuracy is None else f"{one.accuracy:.2%}",
                "-" if one.interval is None else f"± {100 * one.interval:.2f}",
                one.skipped_steps,
                f"{one.lost_updates:.1%}",
                "-" if parting is None else f"step {parting.step}, {parting.kind} of {parting.layer}",
            )
        )
    print_table(("policy", "meaning", "accuracy", "95 %", "skipped", "lost updates", "parts at"), rows)
    print(verdict)
    print(f"report {page}")
