"""`convolve completion`: print a script that completes commands, options and their values in a shell.

The scripts are made from the parsers of the commands, so they know every option. They start no other program: model,
config and data-set names are written into them, and folders are listed by the shell.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import NoReturn

from convolve import __version__
from convolve.cli.bench import PARTS
from convolve.cli.command import ON_PARSE, Parser, schema_choices
from convolve.cli.console import print_json
from convolve.cli.export import FORMATS
from convolve.cli.shell_text import RENDERERS
from convolve.config.schema import SECTIONS

SHELLS = tuple(RENDERERS)
EPILOG = """examples:
  convolve completion bash > ~/.local/share/bash-completion/completions/convolve
  convolve completion fish > ~/.config/fish/completions/convolve.fish
  convolve completion zsh > ~/.zfunc/_convolve
with fpath+=(~/.zfunc) before compinit in ~/.zshrc"""
# Positional arguments that are neither paths nor choices.
_ARGUMENTS = {"photos": "folder", "run": "run", "runs": "run", "path": "run", "images": "file"}


@dataclass(frozen=True)
class Value:
    """What can be typed: `kind` is words, file, folder, run or none. `count` is 0, 1 or + words."""

    kind: str = "none"
    words: tuple[str, ...] = ()
    count: str = "1"

    @property
    def text(self) -> str:
        """The value as the scripts read it."""
        return " ".join((self.kind, *self.words))


@dataclass(frozen=True)
class CommandSpec:
    """Options of a command with their help and values, and its arguments in order; the last one may repeat."""

    name: str
    options: dict[str, tuple[str, Value]]
    arguments: tuple[Value, ...]


class _BuiltError(Exception):
    def __init__(self, parser: Parser) -> None:
        self.parser = parser


def run(argv: Sequence[str]) -> int:
    """Print the script of a shell."""
    parser = Parser("completion", "Print a script that completes convolve commands in a shell.", epilog=EPILOG)
    parser.add_argument("shell", choices=SHELLS, help=f"shell that reads the script: {', '.join(SHELLS)}")
    options = parser.parse(argv)
    script = write_script(options.shell)
    if options.json:
        print_json({"shell": options.shell, "script": script})
    else:
        print(script, end="")
    return 0


def write_script(shell: str) -> str:
    """Return the completion script of a shell."""
    from convolve.cli.main import COMMANDS

    template = resources.files("convolve.cli").joinpath("shells", RENDERERS[shell].file).read_text(encoding="utf-8")
    fields = {"VERSION": __version__, **RENDERERS[shell].render(find_specs(), COMMANDS, PARTS)}
    for name, text in fields.items():
        template = template.replace(f"@{name}@", text)
    return template


def find_specs() -> list[CommandSpec]:
    """Return the options and arguments of every command, and of every part of `bench`."""
    from convolve.cli.main import ALIASES, COMMANDS

    names = [name for name in COMMANDS if name != "bench"] + [f"bench {part}" for part in PARTS]
    specs = {name: _find_spec(name) for name in names}
    for alias, words in ALIASES.items():
        found = specs[" ".join(words)]
        specs[alias] = CommandSpec(alias, found.options, found.arguments)
    return [*specs.values()]


def _find_spec(name: str) -> CommandSpec:
    words = name_words(name)
    parsers = [find_parser(name, [])]
    if name == "validate":  # has other options with --weights
        parsers.append(find_parser(name, ["--weights=x"]))
    options: dict[str, tuple[str, Value]] = {}
    for parser in parsers:
        for action in parser._actions:
            if action.help is not argparse.SUPPRESS:
                for flag in action.option_strings:
                    options.setdefault(flag, (_plain_help(action), _option_value(name, action, words)))
    arguments = [_argument_value(name, action, words) for action in parsers[0]._get_positional_actions()]
    return CommandSpec(name, options, tuple(arguments))


def find_parser(name: str, argv: Sequence[str]) -> Parser:
    """Return the parser of a command. Its `run` stops where it would parse the arguments."""

    def stop(parser: Parser) -> NoReturn:
        raise _BuiltError(parser)

    command, _, part = name.partition(" ")
    token = ON_PARSE.set(stop)
    try:
        import_module(f"convolve.cli.{command.replace('-', '_')}").run([*([part] if part else []), *argv])
    except _BuiltError as built:
        return built.parser
    finally:
        ON_PARSE.reset(token)
    raise AssertionError(f"{name}: parses no arguments")


def _plain_help(action: argparse.Action) -> str:
    """Return the first clause of a help text."""
    text = (action.help or "").replace("%%", "%").partition("; ")[0].partition(" [")[0]
    return " ".join(text.split())


def _option_value(name: str, action: argparse.Action, words: dict[str, tuple[str, ...]]) -> Value:
    if action.nargs == 0:
        return Value(count="0")
    count = "+" if action.nargs in ("+", "*") else "1"
    flag = action.option_strings[-1]
    known = action.choices or schema_choices().get(action.dest)
    if not known and ":" not in str(action.metavar):  # PACKAGE:NAME is code of the user
        known = words.get(flag)
    if known:
        return Value("words", tuple(map(str, known)), count)
    return Value(_path_kind(action), (), count)


def _path_kind(action: argparse.Action) -> str:
    metavar = str(action.metavar or "")
    if action.dest.endswith("_dir") or metavar in ("FOLDER", "DIR"):
        return "folder"
    return "file" if action.type is Path or metavar.startswith(("PATH", "FILE")) else "none"


def _argument_value(name: str, action: argparse.Action, words: dict[str, tuple[str, ...]]) -> Value:
    count = "+" if action.nargs in ("+", "*") else "1"
    if action.choices:
        return Value("words", tuple(map(str, action.choices)), count)
    if name in ("configs", "describe") and action.dest == "name":
        models = words["--model"] if name == "describe" else ()
        return Value("words", (*words["--config"], *models), count)
    if action.dest in _ARGUMENTS:
        return Value(_ARGUMENTS[action.dest], (), count)
    return Value("file" if action.type is Path or name == "data" else "none", (), count)


def name_words(command: str) -> dict[str, tuple[str, ...]]:
    """Return the names that options of a command accept, by option."""
    from convolve.checkpoint.weights_table import WEIGHTS
    from convolve.config.loading import shipped
    from convolve.data.catalog import CATALOG
    from convolve.inference.engines.base import CHOICES
    from convolve.models import registry

    names = {
        "--config": tuple(shipped()),
        "--model": tuple(registry.names()),
        "--weights": ("imagenet", "none", *WEIGHTS),
        "--dataset": tuple(CATALOG),
        "--engine": CHOICES,
        "--help": (*SECTIONS, "all"),
    }
    return {**names, "--format": tuple(FORMATS)} if command == "export" else names
