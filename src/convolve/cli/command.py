"""Flags from the schema: each knob becomes `--kebab-case`, switches become `--x/--no-x`, nothing is declared twice.

Starting processes: the command calls itself once for each rank, through torch's elastic launcher.

An instance is one such launcher with its ranks. A host has one of them or several; together they make a job. A job
that lost a rank is started again as a whole, from its newest checkpoint: nothing half-alive is patched.

A verb in processes of its own on this host.
"""

import argparse
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from convolve.config import Config
from convolve.config.loading import flag_name, resolve
from convolve.config.model_options import EVERY_MODEL, Family, family_of
from convolve.config.schema import SECTION_OF, SECTIONS, fields
from convolve.distributed.launch.local import run_attempts, start_processes
from convolve.distributed.topology import is_distributed
from convolve.errors import ConfigError, suggest

DEFAULT_CONFIG = "lenet-mnist"


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


def format_value(value: object) -> str:
    """A value as helps and tables write it; nothing for one that is not there."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple | list):
        return " ".join(format_value(one) for one in value)
    return "" if value is None else str(value)


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
    text, default = (info.description or "").replace("%", "%%"), format_value(info.get_default())
    return f"{text} [{default}]" if default else text


def _own_help(family: Family, name: str, info: FieldInfo) -> str:
    """The help of an option with a family's own default, and the one for small images where that differs."""
    defaults = [family.defaults[name]]
    if family.cifar.get(name, defaults[0]) != defaults[0]:
        defaults.append(family.cifar[name])
    words = [format_value(value) or "by size" for value in defaults]
    small = f", {words[1]} on small images" if len(words) > 1 else ""
    return f"{(info.description or '').replace('%', '%%')} [{words[0]}{small}]"


def _help_for(family: Family | None, section: str, name: str, info: FieldInfo) -> str:
    """What `--help` says about an option; options that the network asked about does not have are left out."""
    if family is not None and name in family.defaults:
        return _own_help(family, name, info)
    foreign = family is not None and section == "model" and name not in EVERY_MODEL
    return argparse.SUPPRESS if foreign else _help(info)


def asked_model(arguments: Sequence[str]) -> str | None:
    """The network that `--help` is asked about, if one is named."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if word == "--model":
            return following
        if word.startswith("--model="):
            return word.partition("=")[2]
    return None


def _add_family_first(parser: Parser, model: str | None) -> dict[str, argparse._ArgumentGroup]:
    """A group for the options of the family that is asked about, before all others."""
    family = None if model is None else family_of(model)
    if family is None:
        return {}
    group = parser.add_argument_group(f"{family.name}: {family.summary}")
    return dict.fromkeys(family.defaults, group)


def add_config_flags(parser: Parser, model: str | None = None) -> None:
    """Every knob of the schema, grouped by section, and the choice of a named config.

    With a `model`, the options of its family come first, with its own defaults.
    """
    parser.add_argument("--config", metavar="NAME", help="named config to start from; `convolve configs` lists them")
    parser.add_argument("--config-path", metavar="FILE", help="your own YAML file of named configs")
    first = _add_family_first(parser, model)
    family = family_of(model) if first and model else None
    groups = {name: parser.add_argument_group(name, kind.__doc__) for name, kind in SECTIONS.items()}
    for section, name, info in fields():
        _add_flag(first.get(name, groups[section]), name, info, _help_for(family, section, name, info))


def add_section_flags(parser: Parser, section: str) -> None:
    """The knobs of one section."""
    group = parser.add_argument_group(section, SECTIONS[section].__doc__)
    for owner, name, info in fields():
        if owner == section:
            _add_flag(group, name, info, _help(info))


def _add_flag(group: argparse._ArgumentGroup, name: str, info: FieldInfo, text: str) -> None:
    kind, _ = _plain(info.annotation)
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
    flag = f"--{flag_name(name)}"
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif get_origin(kind) is tuple:
        group.add_argument(flag, nargs="+", metavar="X", **common)
    else:
        group.add_argument(flag, metavar=_metavar(kind), **common)


def explicit_options(namespace: argparse.Namespace) -> dict[str, Any]:
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


def read_config(namespace: argparse.Namespace) -> Config:
    """The config that flags mean: the one named, else the flags' own network, else the default job."""
    given = explicit_options(namespace)
    chosen = namespace.config or (None if "model" in given else DEFAULT_CONFIG)
    return resolve(chosen, Path(namespace.config_path) if namespace.config_path else None, given).config


def should_spawn(config: Config) -> bool:
    """Whether this process is to start others for a training, rather than be one of them or the only one."""
    return (config.parallel.processes > 1 or config.parallel.max_restarts > 0) and not is_distributed()


def spawn_ranks(arguments: Sequence[str], config: Config) -> int:
    """Run a training's processes here; with --max-restarts again from the newest checkpoint after a failure."""
    world = config.parallel.processes
    if not config.parallel.max_restarts:
        return start_processes(world, arguments)
    from convolve.runs.folder import reserve_run_dir

    folder = None
    if arguments[0] == "train":
        folder = reserve_run_dir(config)
        arguments = [*arguments, "--run-dir", str(folder)]
    return run_attempts(
        lambda words, _: start_processes(world, words),
        arguments,
        folder,
        config.parallel.max_restarts,
        lambda line: print(f"convolve: {line}", file=sys.stderr, flush=True),
    )
