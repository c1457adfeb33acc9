"""`convolve data`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from convolve.cli.command import Parser
from convolve.cli.console import format_bytes, print_json, print_table
from convolve.compat.options import translate_program

SHOWN_FINDINGS = 50


def run(arguments: Sequence[str]) -> int:
    """List the known data sets, fetch one, check one, or make pictures quick to read."""
    parser = Parser(prog="convolve data", description="List, fetch, check or prepare data sets.")
    parser.add_argument("action", choices=ACTIONS, help="what to do")
    parser.add_argument("name", nargs="?", help="data set; for check and prepare a folder")
    parser.add_argument("target", nargs="?", type=Path, help="prepare: new folder to write to")
    group = parser.add_argument_group("prepare")
    group.add_argument("--format", choices=("webdataset", "raw"), default="webdataset", help="tars, or plain pixels")
    group.add_argument("--image-size", type=int, metavar="N", help="resize to centered squares of this side")
    group.add_argument("--quality", type=int, default=95, metavar="N", help="of JPEGs that are made anew [95]")
    group.add_argument("--shard-samples", type=int, default=1000, metavar="N", help="pictures in each tar [1000]")
    group.add_argument("--workers", type=int, metavar="N", help="threads; never changes the result")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse(translate_program("data", arguments))
    if options.action != "list" and options.name is None:
        parser.error(f"data {options.action}: name a data set; `convolve data list` shows them")
    if options.action == "prepare":
        _check_prepare(parser, options)
    return ACTIONS[options.action](options)


def _check_prepare(parser: Parser, options: argparse.Namespace) -> None:
    if options.target is None:
        parser.error("data prepare: give the folder with pictures and a new folder to write to")
    for name, low, high in (("image_size", 1, 4096), ("quality", 1, 100), ("shard_samples", 1, 1_000_000)):
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            parser.error(f"{name.replace('_', '-')}={value}: must be {low} to {high}")


def _list(options: argparse.Namespace) -> int:

    from convolve.data import check

    listings = check.list_datasets()
    if options.json:
        print_json(listings)
        return 0
    rows = [
        (one.name, one.what, one.place or f"{format_bytes(one.fetched_bytes)} to fetch", one.licence)
        for one in listings
    ]
    print_table(("data set", "what", "where", "license"), rows)
    return 0


def _get(options: argparse.Namespace) -> int:

    from convolve.cli.console import PlainConsole, open_console
    from convolve.data import check

    console = PlainConsole() if options.json else open_console()
    supply = check.fetch_dataset(options.name, progress=console.progress)
    console.close()
    print(f"{supply.name}: {'fetched to' if supply.fetched else 'already in'} {supply.place}")
    if options.json:
        print_json(supply)
    return 0


def _check(options: argparse.Namespace) -> int:
    """Exit code 1 where a picture is broken or a prepared file is not what was written."""

    from convolve.cli.console import PlainConsole, open_console
    from convolve.data import check

    console = PlainConsole() if options.json else open_console()
    report = check.check_data(options.name, announce=console.info, progress=console.progress)
    console.close()
    code = 1 if any(finding.kind in ("broken", "checksum") for finding in report.findings) else 0
    if options.json:
        print_json(report)
        return code
    shape = "of various sizes" if report.image_shape is None else "x".join(map(str, report.image_shape))
    print(f"{report.name}: {report.origin}; images {shape}; contents {report.contents}")
    counts = [(label, report.train_counts[label], report.test_counts[label]) for label in report.train_counts]
    print_table(("class", "train", "test"), counts)
    if report.findings:
        rows = [(finding.kind, finding.name, finding.what) for finding in report.findings]
        print_table(("finding", "picture", "what"), rows[:SHOWN_FINDINGS])
        print(f"{len(rows)} findings" + (f", the first {SHOWN_FINDINGS} shown" if len(rows) > SHOWN_FINDINGS else ""))
    return code


def _prepare(options: argparse.Namespace) -> int:

    from convolve.cli.console import PlainConsole, open_console
    from convolve.data import prepare
    from convolve.data.prepare import PrepareOptions

    console = PlainConsole() if options.json else open_console()
    wanted = PrepareOptions(options.format, options.image_size, options.quality, options.shard_samples)
    made = prepare.prepare_images(Path(options.name), options.target, wanted, options.workers, console.progress)
    console.close()
    print(
        f"{made.place}: {made.train_samples:,} training and {made.test_samples:,} test pictures in {made.files} files, "
        f"{format_bytes(made.stored_bytes)}; train with --data-dir {made.place}"
    )
    if options.json:
        print_json(made)
    return 0


ACTIONS = {"list": _list, "get": _get, "check": _check, "prepare": _prepare}
