"""Python functions of `convolve configs`: list the named configs, and show the origin of each value."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convolve.config.loading import find_config, flag_name, json_schema, load_entries, resolve

__all__ = ["ConfigListing", "Value", "json_schema", "list_configs", "show"]


@dataclass(frozen=True)
class ConfigListing:
    """One named config in the list."""

    name: str
    summary: str
    base: str | None
    also: tuple[str, ...]


@dataclass(frozen=True)
class Value:
    """One option of a resolved config and the layer that set it."""

    option: str
    value: Any
    origin: str


def list_configs(path: Path | None) -> list[ConfigListing]:
    """Return all named configs, shipped ones and those in the file at `path`."""
    return [ConfigListing(entry.name, entry.summary, entry.base, entry.also) for entry in load_entries(path).values()]


def show(name: str, path: Path | None) -> list[Value]:
    """Return one config with all its values and their origins."""
    find_config(name, load_entries(path))
    resolved = resolve(name, path)
    return [
        Value(flag_name(option), value, resolved.origins[option]) for option, value in resolved.config.values().items()
    ]
