"""`convolve configs`."""

import json
from collections.abc import Sequence
from pathlib import Path

import convolve
from convolve.cli.command import Parser, format_value
from convolve.cli.console import print_json, print_table


def run(argv: Sequence[str]) -> int:
    """List the named configs, show one with the origin of each value, or print the schema of config files."""
    parser = Parser("configs", "List the named configs, or show one with all its values.")
    parser.add_argument("name", nargs="?", help="config to show")
    parser.add_argument("--config-path", type=Path, metavar="FILE", help="YAML file with your named configs")
    parser.add_argument("--schema", action="store_true", help="print a JSON schema of config files, for editors")
    options = parser.parse(argv)
    if options.schema:
        print(json.dumps(convolve.config_schema(), indent=None if options.json else 2))
        return 0
    if options.name:
        values = convolve.config_values(options.name, options.config_path)
        if options.json:
            print_json({item.option: {"value": item.value, "origin": item.origin} for item in values})
        else:
            rows = [(item.option, format_value(item.value), item.origin) for item in values]
            print_table(("option", "value", "from"), rows)
        return 0
    configs = convolve.configs(options.config_path)
    if options.json:
        print_json({"configs": configs})
    else:
        print_table(("config", "summary"), [(config.name, config.summary) for config in configs])
    return 0
