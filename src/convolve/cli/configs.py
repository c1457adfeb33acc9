"""`convolve configs`."""

import json
from collections.abc import Sequence
from pathlib import Path

from convolve import api
from convolve.cli.command import Parser, format_value
from convolve.cli.console import print_json, print_table


def run(arguments: Sequence[str]) -> int:
    """List the named configs, show one with the origin of each value, or print the schema of config files."""
    parser = Parser(prog="convolve configs", description="List the named configs, or show one.")
    parser.add_argument("name", nargs="?", help="config to show with all its values")
    parser.add_argument("--config-path", type=Path, help="your own YAML file of named configs")
    parser.add_argument("--schema", action="store_true", help="print a JSON schema of config files, for editors")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse(arguments)
    if options.schema:
        print(json.dumps(api.json_schema(), indent=2))
    elif options.name:
        values = api.show(options.name, options.config_path)
        if options.json:
            print_json({value.option: {"value": value.value, "origin": value.origin} for value in values})
        else:
            print_table(
                ("option", "value", "from"), [(one.option, format_value(one.value), one.origin) for one in values]
            )
    else:
        entries = api.list_configs(options.config_path)
        if options.json:
            print_json(entries)
        else:
            print_table(("config", "what"), [(entry.name, entry.summary) for entry in entries])
    return 0
