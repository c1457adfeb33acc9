"""YAML as convolve accepts it: plain data, each key once, no aliases, no large files.

A config file may come from a stranger. The safe loader builds plain types only; duplicate keys are refused because one
of two values would be lost silently; aliases are refused because a few lines of them can expand to gigabytes, and
`base:` does what they would be used for.
"""

from pathlib import Path
from typing import Any

import yaml

from convolve.errors import ConfigError

MAX_BYTES = 1 << 20


class _StrictLoader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise ConfigError(f"line {line}: YAML aliases are not accepted; inherit with `base: NAME` instead")
        return super().compose_node(parent, index)

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


def parse_yaml(text: str, origin: str) -> dict[str, Any]:
    """The mapping that a YAML text holds; `origin` names the text in errors."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{origin}: {len(text)} bytes; a config file has at most {MAX_BYTES}")
    try:
        content = yaml.load(text, _StrictLoader)
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


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: {path.stat().st_size} bytes; a config file has at most {MAX_BYTES}")
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file; a config file is YAML in UTF-8") from None
