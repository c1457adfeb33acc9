"""`convolve configs`: what is shipped, and where each value of one config comes from."""

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
    """One option of a resolved config and the layer that it comes from."""

    option: str
    value: Any
    origin: str


def list_configs(path: Path | None) -> list[ConfigListing]:
    """Every named config, the user's own included."""
    return [ConfigListing(entry.name, entry.summary, entry.base, entry.also) for entry in load_entries(path).values()]


def show(name: str, path: Path | None) -> list[Value]:
    """One config with all its values."""
    find_config(name, load_entries(path))
    resolved = resolve(name, path)
    return [Value(flag_name(knob), value, resolved.origins[knob]) for knob, value in resolved.config.values().items()]
