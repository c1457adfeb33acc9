"""Flags from the schema: each knob becomes `--kebab-case`, switches become `--x/--no-x`, nothing is declared twice."""

import argparse
import types
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from convolve.config.loading import flag_name
from convolve.config.schema import SECTION_OF, SECTIONS, fields
from convolve.errors import ConfigError, suggest


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of printing a usage text, and knows the nearest flag."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Help, **options)

    def error(self, message: str) -> NoReturn:
        """Every complaint is a ConfigError."""
        raise ConfigError(message)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse all arguments; an unknown flag is an error that names the nearest ones."""
        namespace, unknown = self.parse_known_args(arguments)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
            given = unknown[0].partition("=")[0]
            raise ConfigError(f"{given}: {self.prog} does not take it; {suggest(given, known)}")
        return namespace


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


def _plain(annotation: Any) -> tuple[Any, bool]:
    """The type without `| None`, and whether None was allowed."""
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        return rest[0], True
    return annotation, False


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(str(choice) for choice in get_args(kind))
    return {int: "N", float: "X", str: "NAME"}.get(kind, "PATH")


def _help(info: FieldInfo) -> str:
    default = info.get_default()
    shown = {True: "on", False: "off"}.get(default, default) if isinstance(default, bool) else default
    text = (info.description or "").replace("%", "%%")
    return text if default is None else f"{text} [{shown}]"


def add_config_flags(parser: Parser) -> None:
    """Every knob of the schema, grouped by section, and the choice of a named config."""
    parser.add_argument("--config", metavar="NAME", help="named config to start from; `convolve configs` lists them")
    parser.add_argument("--config-path", metavar="FILE", help="your own YAML file of named configs")
    groups = {name: parser.add_argument_group(name, kind.__doc__) for name, kind in SECTIONS.items()}
    for section, name, info in fields():
        kind, _ = _plain(info.annotation)
        common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": _help(info)}
        flag = f"--{flag_name(name)}"
        if kind is bool:
            groups[section].add_argument(flag, action=argparse.BooleanOptionalAction, **common)
        elif get_origin(kind) is tuple:
            groups[section].add_argument(flag, nargs="+", metavar="X", **common)
        else:
            groups[section].add_argument(flag, metavar=_metavar(kind), **common)


def given_values(namespace: argparse.Namespace) -> dict[str, Any]:
    """The knobs that were really given, with `none` as the way to unset one and commas as the way to list."""
    annotations = {name: info.annotation for _, name, info in fields()}
    given = {}
    for name, value in vars(namespace).items():
        if name in SECTION_OF:
            _, optional = _plain(annotations[name])
            if isinstance(value, list):
                value = [item for word in value for item in str(word).split(",") if item]
            given[name] = None if optional and value == "none" else value
    return given
