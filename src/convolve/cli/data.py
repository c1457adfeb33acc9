"""`convolve data`."""

from collections.abc import Sequence

from convolve.cli.flags import Parser
from convolve.cli.output import print_json, print_table, size


def run(arguments: Sequence[str]) -> int:
    """List the known data sets, fetch one, or check one."""
    parser = Parser(prog="convolve data", description="List, fetch or check data sets.")
    parser.add_argument("action", choices=ACTIONS, help="what to do")
    parser.add_argument("name", nargs="?", help="data set; for check also a folder")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse(arguments)
    if options.action != "list" and options.name is None:
        parser.error(f"data {options.action}: name a data set; `convolve data list` shows them")
    ACTIONS[options.action](options.name, options.json)
    return 0


def _list(name: str | None, as_json: bool) -> None:
    from convolve.app import data

    listings = data.list_datasets()
    if as_json:
        print_json(listings)
        return
    rows = [(one.name, one.what, one.place or f"{size(one.fetched_bytes)} to fetch", one.licence) for one in listings]
    print_table(("data set", "what", "where", "licence"), rows)


def _get(name: str, as_json: bool) -> None:
    from convolve.app import data
    from convolve.cli.console import PlainConsole, open_console

    console = PlainConsole() if as_json else open_console()
    supply = data.get(name, progress=console.progress)
    console.close()
    print(f"{supply.name}: {'fetched to' if supply.fetched else 'already in'} {supply.place}")
    if as_json:
        print_json(supply)


def _check(name: str, as_json: bool) -> None:
    from convolve.app import data
    from convolve.cli.console import PlainConsole, open_console

    console = PlainConsole() if as_json else open_console()
    report = data.check(name, announce=console.say, progress=console.progress)
    console.close()
    if as_json:
        print_json(report)
        return
    shape = "x".join(map(str, report.image_shape))
    print(f"{report.name}: {report.origin}; images {shape}; contents {report.contents}")
    counts = [(label, report.train_counts[label], report.test_counts[label]) for label in report.train_counts]
    print_table(("class", "train", "test"), counts)


ACTIONS = {"list": _list, "get": _get, "check": _check}
