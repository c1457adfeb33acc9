"""`convolve data`."""

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import convolve
from convolve.cli.command import Parser
from convolve.cli.console import format_bytes, open_console, print_json, print_result, print_table
from convolve.compat.programs import translate_program
from convolve.errors import ConfigError

if TYPE_CHECKING:
    from convolve.data.check import DataReport
    from convolve.runs.data_check import CleanReport

SHOWN_ISSUES = 50
MOVED_BY_DEFAULT = ("broken", "not-images", "duplicates")


def run(argv: Sequence[str]) -> int:
    """List the known data sets, fetch one, check one, clean a folder, or store images in a faster format."""
    parser = Parser("data", "List, fetch, check, clean or prepare data sets.")
    parser.add_argument(
        "action", choices=ACTIONS, help="list, get (fetch), check, clean (photos), or prepare (store for fast reading)"
    )
    parser.add_argument("name", nargs="?", help="data set; for check, clean and prepare a folder")
    parser.add_argument("target", nargs="?", type=Path, help="prepare: new folder to write to")
    _add_clean_flags(parser)
    group = parser.add_argument_group("prepare")
    group.add_argument(
        "--format", choices=("webdataset", "raw"), default="webdataset", help="tar shards, or raw pixels [webdataset]"
    )
    group.add_argument("--image-size", type=int, metavar="N", help="resize to centered squares of N pixels [no resize]")
    group.add_argument("--quality", type=int, default=95, metavar="N", help="JPEG quality of re-encoded images [95]")
    group.add_argument("--shard-samples", type=int, default=1000, metavar="N", help="images in each tar [1000]")
    group.add_argument("--workers", type=int, metavar="N", help="threads; does not change the result [one per CPU]")
    options = parser.parse(translate_program("data", argv))
    if options.action != "clean" and (options.move or options.kinds or options.weights != "imagenet"):
        raise ConfigError(f"data {options.action}: --move, --kinds and --weights are options of data clean; omit them")
    if options.action != "list" and options.name is None:
        raise ConfigError(f"data {options.action}: name a data set; list them with `convolve data list`")
    if options.action == "prepare" and options.target is None:
        raise ConfigError("data prepare: name the folder with images and a new folder to write to")
    return ACTIONS[options.action](options)


def _add_clean_flags(parser: Parser) -> None:
    group = parser.add_argument_group("clean")
    group.add_argument("--move", type=Path, metavar="FOLDER", help="move what was found to this folder [only list it]")
    group.add_argument(
        "--kinds",
        nargs="+",
        metavar="KIND",
        help="what to move: broken, not-images, duplicates, near-duplicates, wrong-labels [the first three]",
    )
    group.add_argument(
        "--weights", default="imagenet", metavar="NAME", help="weights that judge the labels; none: do not [imagenet]"
    )


def _list(options: Namespace) -> int:
    datasets = convolve.data.list()
    if options.json:
        print_json({"datasets": datasets})
        return 0
    rows = [
        (item.name, item.what, item.place or f"{format_bytes(item.fetched_bytes)} to fetch", item.licence)
        for item in datasets
    ]
    print_table(("data set", "contents", "location", "license"), rows)
    return 0


def _get(options: Namespace) -> int:
    with open_console(options.json) as console:
        report = convolve.data.get(options.name, progress=console)
    print(f"{report.name}: {'fetched to' if report.fetched else 'already in'} {report.place}")
    if options.json:
        print_json(report)
    return 0


def _check(options: Namespace) -> int:
    """Check a data set; exit code 1 if an image is broken or a prepared file differs from what was written."""
    with open_console(options.json) as console:
        report = convolve.data.check(options.name, progress=console)
    print_result(report, options.json, _print_check)
    return 1 if any(issue.kind in ("broken", "checksum") for issue in report.findings) else 0


def _print_check(report: "DataReport") -> None:
    shape = "of various sizes" if report.image_shape is None else "x".join(map(str, report.image_shape))
    print(f"{report.name}: {report.origin}; images {shape}; contents {report.contents}")
    counts = [(label, report.train_counts[label], report.test_counts[label]) for label in report.train_counts]
    print_table(("class", "train", "test"), counts)
    if report.findings:
        rows = [(issue.kind, issue.name, issue.what) for issue in report.findings]
        print_table(("issue", "image", "details"), rows[:SHOWN_ISSUES])
        print(f"{len(rows)} issues" + (f", the first {SHOWN_ISSUES} shown" if len(rows) > SHOWN_ISSUES else ""))


def _clean(options: Namespace) -> int:
    """Show what was found in a folder of photos, and move it on request."""
    kinds = [kind for word in options.kinds or () for kind in word.split(",") if kind]
    with open_console(options.json) as console:
        report = convolve.data.clean(
            options.name,
            move=options.move,
            kinds=kinds or MOVED_BY_DEFAULT,
            weights=None if options.weights == "none" else options.weights,
            progress=console,
        )
    print_result(report, options.json, _print_clean)
    return 0


def _print_clean(report: "CleanReport") -> None:
    from convolve.data.inspect import format_findings

    def short(path: str) -> str:
        return os.path.relpath(path, report.folder) if os.sep in path else path

    for line in format_findings(report.findings, report.folder):
        print(line)
    found = report.findings.findings
    rows = [
        (one.kind, short(one.path), f"{one.detail}: {short(one.other)}" if one.other else one.detail) for one in found
    ]
    if rows:
        print_table(("finding", "file or class", "details"), rows[:SHOWN_ISSUES])
        print(f"{len(rows)} findings" + (f", the first {SHOWN_ISSUES} shown" if len(rows) > SHOWN_ISSUES else ""))
    if report.moved_to is not None:
        print(f"moved {len(report.moved)} files to {report.moved_to}; {report.moved_to / 'moved.csv'} lists them")


def _prepare(options: Namespace) -> int:
    report = convolve.data.prepare(
        options.name,
        options.target,
        format=options.format,
        image_size=options.image_size,
        quality=options.quality,
        shard_samples=options.shard_samples,
        workers=options.workers,
    )
    print(
        f"{report.place}: {report.train_samples:,} training and {report.test_samples:,} test images in "
        f"{report.files} files, {format_bytes(report.stored_bytes)}; train with --data-dir {report.place}"
    )
    if options.json:
        print_json(report)
    return 0


ACTIONS = {"list": _list, "get": _get, "check": _check, "clean": _clean, "prepare": _prepare}
