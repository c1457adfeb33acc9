"""List the named configs, show the origin of each value, and trace the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convolve.api.session import session
from convolve.compat.config_files import load_entries, resolve
from convolve.config.loading import find_config, flag_name, json_schema

if TYPE_CHECKING:
    from convolve.runs.describe import ScheduleCurve

__all__ = ["ConfigListing", "ConfigValue", "config_schema", "config_values", "configs", "trace_schedule"]


@dataclass(frozen=True)
class ConfigListing:
    """One named config in the list."""

    name: str
    summary: str
    base: str | None
    also: tuple[str, ...]


@dataclass(frozen=True)
class ConfigValue:
    """One option of a resolved config and the layer that set it."""

    option: str
    value: Any
    origin: str


def configs(config_path: str | Path | None = None) -> list[ConfigListing]:
    """Return all named configs, shipped ones and those in the file at `config_path`."""
    entries = load_entries(None if config_path is None else Path(config_path))
    return [ConfigListing(entry.name, entry.summary, entry.base, entry.also) for entry in entries.values()]


def config_values(name: str, config_path: str | Path | None = None) -> list[ConfigValue]:
    """Return one config with all its values and their origins."""
    path = None if config_path is None else Path(config_path)
    find_config(name, load_entries(path))
    resolved = resolve(name, path)
    return [
        ConfigValue(flag_name(option), value, resolved.origins[option])
        for option, value in resolved.config.values().items()
    ]


def config_schema() -> dict[str, Any]:
    """Return a JSON schema of config files, for editors."""
    return json_schema()


def trace_schedule(what: str, config_path: str | Path | None = None) -> ScheduleCurve:
    """Return the learning rate over a run, of a named config or a run folder."""
    with session():
        from convolve.runs import describe

        return describe.trace_schedule(what, config_path=None if config_path is None else Path(config_path))
