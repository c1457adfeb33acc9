"""`convolve align`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import convolve
from convolve.cli.command import Parser, add_config_flags, read_config, translate_options
from convolve.cli.console import open_console, print_json, print_table

if TYPE_CHECKING:
    from convolve.alignment.align import AlignReport

DESCRIPTION = (
    "Train one config in several number formats, or compare finished runs, and find where and why they diverge."
)


def _parser() -> Parser:
    parser = Parser("align", DESCRIPTION)
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="finished runs to compare, instead of training"
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["32.32", "16.32", "16.16"],
        metavar="POLICY",
        help="policies, the reference first, such as 16.16, 16.16:nearest, 16.32:bf16:half-partials or ipu-mk2 "
        "[32.32 16.32 16.16]",
    )
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="runs of each policy, with increasing seeds [1]"
    )
    parser.add_argument("--walk-steps", type=int, default=20, metavar="N", help="steps compared layer by layer [20]")
    parser.add_argument(
        "--tolerance", type=float, default=0.1, metavar="X", help="relative error that counts as divergence [0.1]"
    )
    parser.add_argument(
        "--points",
        type=float,
        default=0.15,
        metavar="X",
        help="accuracy difference that still agrees, in points [0.15]",
    )
    parser.add_argument("--out", type=Path, default=Path("align"), metavar="DIR", help="folder of the report [align]")
    add_config_flags(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    """Compare number formats and print the conclusion."""
    options = _parser().parse(translate_options(argv))
    config = read_config(options)

    convolve.prepare()
    from convolve.alignment import align

    plan = align.AlignPlan(
        tuple(options.policies), options.seeds, options.walk_steps, options.tolerance, options.points
    )
    with open_console(options.json) as console:
        report = convolve.align(options.runs or config, plan, output=options.out, progress=console)
    _print_report(report)
    if options.json:
        candidates = [align.to_plain(candidate) for candidate in report.candidates]
        print_json({"verdict": report.conclusion, "page": report.page, "candidates": candidates})
    return 0


def _print_report(report: "AlignReport") -> None:
    rows = [
        (
            candidate.name,
            candidate.policy,
            "-" if candidate.accuracy is None else f"{candidate.accuracy:.2%}",
            "-" if candidate.interval is None else f"± {100 * candidate.interval:.2f}",
            candidate.skipped_steps,
            f"{candidate.lost_updates:.1%}",
            "-" if candidate.first_divergence is None else str(candidate.first_divergence),
        )
        for candidate in report.candidates
    ]
    print_table(("policy", "meaning", "accuracy", "95 %", "skipped", "lost updates", "diverges at"), rows)
    print(report.conclusion)
    print(f"report {report.page}")
