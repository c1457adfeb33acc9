"""`convolve cache`."""

from collections.abc import Sequence

import convolve
from convolve import device
from convolve.cache import KINDS
from convolve.cli.command import Parser
from convolve.cli.console import format_bytes, print_json, print_table
from convolve.errors import ConfigError


def run(argv: Sequence[str]) -> int:
    """List or remove what is in the cache."""
    parser = Parser("cache", "List or remove cached weights, features, data sets and indexes.")
    parser.add_argument("action", nargs="?", choices=("list", "remove"), default="list", help="what to do [list]")
    parser.add_argument("names", nargs="*", metavar="NAME", help="remove: names as listed")
    kinds = ", ".join(KINDS)
    parser.add_argument(
        "--kind", choices=tuple(KINDS), metavar="KIND", help=f"only entries of this kind: {kinds} [all]"
    )
    parser.add_argument("--all", action="store_true", help="remove: every entry, of --kind if given")
    options = parser.parse(argv)
    remove = options.action == "remove"
    if remove and bool(options.names) == options.all:
        raise ConfigError("cache remove: give either names or --all; `convolve cache` lists the names")
    if not remove and (options.names or options.all):
        raise ConfigError("cache list: takes no names; use `convolve cache remove NAME`")
    entries = convolve.cache(*options.names, kind=options.kind, remove=remove)
    total = sum(entry.bytes for entry in entries)
    if options.json:
        listed = [{**vars(entry), "last_use": entry.last_use.isoformat(timespec="seconds")} for entry in entries]
        print_json({"folder": device.cache_folder(), "bytes": total, "entries": listed})
    elif remove:
        print(f"removed {len(entries)} entries, {format_bytes(total)}")
    else:
        rows = [
            (entry.kind, entry.name, format_bytes(entry.bytes), f"{entry.last_use:%Y-%m-%d %H:%M}", entry.path)
            for entry in entries
        ]
        print_table(("kind", "name", "size", "last use (UTC)", "path"), rows)
        print(f"{len(entries)} entries, {format_bytes(total)} in {device.cache_folder()}")
    return 0
