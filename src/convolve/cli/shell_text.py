"""Tables of options and values in the syntax of bash, zsh and fish, for the templates in `shells/`."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convolve.run_files import CONFIG_FILE

if TYPE_CHECKING:
    from convolve.cli.completion import CommandSpec

Fields = dict[str, str]
_MANY = 100


@dataclass(frozen=True)
class Renderer:
    """Template of a shell, and the function that returns the texts to insert by field."""

    file: str
    render: Callable[[Sequence[CommandSpec], Mapping[str, str], Mapping[str, str]], Fields]


@dataclass(frozen=True)
class Tables:
    """What a script looks up.

    `shared` are the options of all commands that take a config; `options` has those of each command, without the shared
    ones if it takes them (`takes_shared`). `values` are by option, and `special` those of a command that differ.
    """

    shared: dict[str, str]
    takes_shared: frozenset[str]
    options: dict[str, dict[str, str]]
    values: dict[str, str]
    special: dict[str, str]
    arguments: dict[str, str]


def collect(specs: Sequence[CommandSpec]) -> Tables:
    """Return the tables of all commands."""
    helps = {spec.name: {flag: text for flag, (text, _) in spec.options.items()} for spec in specs}
    large = [name for name, options in helps.items() if len(options) > _MANY]
    shared = {flag: text for flag, text in helps[large[0]].items() if all(flag in helps[name] for name in large)}
    options = {
        name: {flag: text for flag, text in found.items() if name not in large or flag not in shared}
        for name, found in helps.items()
    }
    found = {
        (spec.name, flag): f"{value.count} {value.text}" for spec in specs for flag, (_, value) in spec.options.items()
    }
    values = {flag: _most_common([text for (_, other), text in found.items() if other == flag]) for _, flag in found}
    special = {f"{name} {flag}": text for (name, flag), text in found.items() if text != values[flag]}
    return Tables(shared, frozenset(large), options, values, special, _arguments(specs))


def _most_common(texts: Sequence[str]) -> str:
    return Counter(texts).most_common(1)[0][0]


def _arguments(specs: Sequence[CommandSpec]) -> dict[str, str]:
    """Return values by command and number of the argument; `*` is any further number."""
    return {
        f"{spec.name} {'*' if value.count == '+' else number}": value.text
        for spec in specs
        for number, value in enumerate(spec.arguments, start=1)
    }


def _group(table: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the keys of each value, in order."""
    groups: dict[str, list[str]] = {}
    for key, value in table.items():
        groups.setdefault(value, []).append(key)
    return groups


def _cases(table: Mapping[str, str], form: Callable[[Sequence[str], str], str]) -> str:
    """Return one case for each group of keys; those with `*` come last."""
    exact = _group({key: value for key, value in table.items() if "*" not in key})
    open_ended = _group({key: value for key, value in table.items() if "*" in key})
    return "\n".join(form(keys, value) for groups in (exact, open_ended) for value, keys in groups.items())


def _bash_pattern(key: str) -> str:
    return f'"{key[:-1]}"*' if key.endswith("*") else f'"{key}"'


def _bash_case(keys: Sequence[str], value: str) -> str:
    return f'    {" | ".join(map(_bash_pattern, keys))}) REPLY="{value}" ;;'


def _bash_return(keys: Sequence[str], value: str) -> str:
    return _bash_case(keys, value).replace(" ;;", " && return ;;")


def _bash_values(tables: Tables) -> Fields:
    return {
        "SPECIAL_VALUES": _cases(tables.special, _bash_return),
        "VALUES": _cases({key: value for key, value in tables.values.items() if value[0] != "0"}, _bash_case),
        "ARGUMENTS": _cases(tables.arguments, _bash_case),
        "CONFIG_FILE": CONFIG_FILE,
    }


def _render_bash(specs: Sequence[CommandSpec], commands: Mapping[str, str], parts: Mapping[str, str]) -> Fields:
    tables = collect(specs)
    lists = {
        name: " ".join([*found, *(["$__convolve_shared"] if name in tables.takes_shared else [])])
        for name, found in tables.options.items()
    }
    return {
        **_bash_values(tables),
        "SHARED": " ".join(tables.shared),
        "OPTIONS": _cases(lists, _bash_case),
        "COMMANDS": " ".join(commands),
        "PARTS": " ".join(parts),
    }


def _described(table: Mapping[str, str], indent: str, form: Callable[[str, str], str]) -> str:
    return "\n".join(f"{indent}{form(name, text)}" for name, text in table.items())


def _zsh_item(name: str, text: str) -> str:
    return shlex.quote(f"{name}:{text}")


def _render_zsh(specs: Sequence[CommandSpec], commands: Mapping[str, str], parts: Mapping[str, str]) -> Fields:
    tables = collect(specs)
    cases = []
    for name, found in tables.options.items():
        items = [_zsh_item(flag, text) for flag, text in found.items()]
        shared = ["$__convolve_shared"] if name in tables.takes_shared else []
        cases.append(f'    "{name}") reply=({" ".join([*items, *shared])}) ;;')
    return {
        **_bash_values(tables),
        "SHARED": _described(tables.shared, "  ", _zsh_item),
        "OPTIONS": "\n".join(cases),
        "COMMANDS": _described(commands, "      ", _zsh_item),
        "PARTS": _described(parts, "      ", _zsh_item),
    }


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _fish_item(name: str, text: str) -> str:
    return _fish_quote(f"{name}\t{text}")


def _fish_case(keys: Sequence[str], value: str) -> str:
    return f"        case {' '.join(map(_fish_quote, keys))}\n            echo {_fish_quote(value)}"


def _fish_return(keys: Sequence[str], value: str) -> str:
    return f"{_fish_case(keys, value)}\n            return"


def _render_fish(specs: Sequence[CommandSpec], commands: Mapping[str, str], parts: Mapping[str, str]) -> Fields:
    tables = collect(specs)
    cases = []
    for name, found in tables.options.items():
        items = [_fish_item(flag, text) for flag, text in found.items()]
        shared = ["$__convolve_shared"] if name in tables.takes_shared else []
        cases.append(f"        case {_fish_quote(name)}\n            printf '%s\\n' {' '.join([*items, *shared])}")
    return {
        "SHARED": " ".join(_fish_item(flag, text) for flag, text in tables.shared.items()),
        "OPTIONS": "\n".join(cases),
        "SPECIAL_VALUES": _cases(tables.special, _fish_return),
        "VALUES": _cases({key: value for key, value in tables.values.items() if value[0] != "0"}, _fish_case),
        "ARGUMENTS": _cases(tables.arguments, _fish_case),
        "COMMANDS": " ".join(_fish_item(name, text) for name, text in commands.items()),
        "PARTS": " ".join(_fish_item(name, text) for name, text in parts.items()),
        "CONFIG_FILE": CONFIG_FILE,
    }


RENDERERS = {
    "bash": Renderer("bash.sh", _render_bash),
    "zsh": Renderer("zsh.sh", _render_zsh),
    "fish": Renderer("fish.fish", _render_fish),
}
