"""YAML of config files and run folders.

Config files are not trusted. The safe loader builds plain types only. Duplicate keys are rejected because one of the
values would be lost silently. Aliases are accepted only in files of named configs, where merged mappings are limited in
size and values cannot be nested: a few lines of aliases can expand to gigabytes.
"""

from pathlib import Path
from typing import Any

import yaml

from convolve.directory import read_regular
from convolve.errors import ConfigError

MAX_BYTES = 1 << 20
_MAX_DIGITS = 64
MAX_ITEMS = 1000
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _StrictLoader(yaml.SafeLoader):
    """Safe loader of plain data: no tags, aliases, dates or base-60 numbers, and each key once."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise ConfigError(f"line {line}: YAML aliases are not accepted; inherit with `base: NAME` instead")
        if getattr(event, "tag", None) is not None:
            raise ConfigError(f"line {line}: YAML tags are not accepted; remove '{event.tag[:40]}'")
        return super().compose_node(parent, index)

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """Return the tag of a node: dates and base-60 numbers are texts."""
        tag: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        if tag == "tag:yaml.org,2002:timestamp" or (tag in _NUMBERS and ":" in value):
            return "tag:yaml.org,2002:str"
        if tag in _NUMBERS and len(value) > _MAX_DIGITS:
            raise ConfigError(f"'{value[:16]}...': a number of {len(value)} characters; write a shorter one")
        return tag

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError(f"line {line}: a list or mapping cannot be a key; write `name: value`")
            if key in seen:
                raise ConfigError(f"line {line}: key '{key}' is given twice; keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep)


class _AliasLoader(_StrictLoader):
    """Strict loader that accepts aliases and merge keys, up to a limit of merged keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            return yaml.SafeLoader.compose_node(self, parent, index)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_ITEMS:
            raise ConfigError(f"line {node.start_mark.line + 1}: more than {MAX_ITEMS} merged keys; merge fewer")


def parse_yaml(text: str, origin: str, *, aliases: bool = False) -> dict[str, Any]:
    """Return the mapping in a YAML text; `origin` names the text in errors."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{origin}: {len(text)} bytes; a config file has at most {MAX_BYTES}")
    try:
        content = yaml.load(text, _AliasLoader if aliases else _StrictLoader)
    except ConfigError as error:
        raise ConfigError(f"{origin}, {error}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        problem = " ".join(str(error).split())[:200]
        raise ConfigError(f"{origin}: not valid YAML: {problem}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{origin}: expected `name: value` lines, found {type(content).__name__}")
    return content


def read_yaml(path: Path, *, aliases: bool = False) -> dict[str, Any]:
    """Return the mapping in a YAML file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: {path.stat().st_size} bytes; a config file has at most {MAX_BYTES}")
        return parse_yaml(read_regular(path).decode(), str(path), aliases=aliases)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read ({error.strerror}); check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file; a config file is YAML in UTF-8") from None
